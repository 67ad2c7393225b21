"""Benchmarks of whole jobs on a local cluster: ``python -m benchmarks WORKLOAD``."""
