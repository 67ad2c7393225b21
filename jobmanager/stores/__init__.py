"""What survives the JobManager beside checkpoints: the graphs of its jobs and the code they need."""
