"""State as tables: what checkpoints and savepoints hold as Arrow, and savepoints that are written from it."""
