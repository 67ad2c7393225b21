"""Spark stages: the process that drives Spark for a slot, what it is told, and the files between the two."""
