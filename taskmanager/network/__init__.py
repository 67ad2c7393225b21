"""Data exchange between subtasks: partitions, frames, connections, gates."""
