"""Operators: what a chain runs."""
