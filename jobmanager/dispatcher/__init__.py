"""Submission, recovery, and the list of jobs with what survives the JobManager."""
