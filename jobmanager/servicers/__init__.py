"""The edge: what clients and TaskManagers call."""
