"""Benchmarks: commands that print a table and JSON lines; never timed tests."""
