"""Event-time progress of a subtask's input: origins, watermarks."""
