"""What the TaskManager and the JobManager say to each other."""
