"""Relational parts of jobs, compiled for Spark: what compiles, what it becomes, and how Spark does it."""
