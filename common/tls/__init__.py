"""TLS between processes: what is plain on one side of a relay is encrypted on its other side."""
