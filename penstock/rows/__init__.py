"""Rows and columns as Python values, and their types."""
