"""The job graph: whether it is valid, how it reads as text, what comes again after a restart."""
