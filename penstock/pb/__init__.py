"""Generated messages and stubs of what clients and the JobManager say to each other."""
