"""Runs a planned job in the calling process, without a cluster: what ``penstock.testing`` stands on."""
