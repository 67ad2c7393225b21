"""Functions with state and timers: what users derive from, and what such a function is given."""
