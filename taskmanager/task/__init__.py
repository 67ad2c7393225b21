"""What runs in a slot process: the mailbox, the subtasks, their chains."""
