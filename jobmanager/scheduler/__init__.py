"""Slots, placement, deployment and splits: pure decisions, and the runner that owns the slots."""
