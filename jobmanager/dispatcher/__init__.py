"""Jobs: submission, the machine of each job, and the actors that run them."""
