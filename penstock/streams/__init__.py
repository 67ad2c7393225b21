"""What one builds a job with: the environment, streams and what may be done to them."""
