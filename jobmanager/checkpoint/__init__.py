"""Checkpoints of one job: when they are taken, when they are complete, and what is kept of them."""
