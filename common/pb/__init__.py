"""Generated messages and stubs of what the daemons say to each other."""
