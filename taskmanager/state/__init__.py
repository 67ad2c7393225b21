"""State of keyed operators: the interface of the backends, and the tables behind it."""
