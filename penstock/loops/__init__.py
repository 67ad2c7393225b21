"""``@ps.compiled``: keyed functions on numbers, compiled into one loop over the rows of a batch."""
