"""Result partitions that are kept: who holds which."""
