"""Declarations of state and what functions hold of it."""
