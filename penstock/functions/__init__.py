"""Classes that users derive from, and how functions are pickled and what they read and return."""
