"""Classes that users derive from, what these are given, and how user code travels."""
