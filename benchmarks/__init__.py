"""Measurements that are too long for the tests: `python -m benchmarks.NAME --json`."""
