"""What the machine of a job hears and what it wants done."""
