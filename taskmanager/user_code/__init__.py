"""The border to user code: loading it, what it raises, what it prints."""
