"""Formats that tools and daemons share: key-groups, key hash and key encoding."""
