"""The execution graph: subtasks, attempts and their states."""
