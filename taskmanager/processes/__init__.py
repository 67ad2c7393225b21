"""Processes of a TaskManager: how they are forked, spoken with and ended."""
