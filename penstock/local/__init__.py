"""Clusters on this machine: embedded in the program, or as daemons of their own."""
