"""The TaskManager: a daemon, its slot processes, and what runs in them."""
