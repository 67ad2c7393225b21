"""Rows of collect sinks on their way to the client."""
