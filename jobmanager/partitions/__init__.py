"""Which kept result partitions of a job there are, and how long."""
