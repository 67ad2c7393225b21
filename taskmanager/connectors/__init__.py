"""Readers and writers behind the source and sink operators."""
