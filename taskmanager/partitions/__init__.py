"""Result partitions that are kept: the log of a subpartition, its files, complete partitions on disk."""
