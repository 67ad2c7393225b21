"""From the frozen state of a subtask to a snapshot in the store."""
