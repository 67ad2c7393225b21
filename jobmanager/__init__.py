"""The JobManager daemon: accepts jobs, gives them slots, and drives them to their end."""
