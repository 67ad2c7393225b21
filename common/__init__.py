"""What both daemons share at run time."""
