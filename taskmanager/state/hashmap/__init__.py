"""State kept in the memory of the slot process."""
