"""Aggregates of groups and windows, and how they are kept."""
