"""What failures are, and what they mean."""
