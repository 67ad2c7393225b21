"""Submission, recovery, and the list of jobs."""
