"""Calls to a cluster, handles of jobs, what is shipped and with which credentials."""
