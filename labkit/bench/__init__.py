"""Benchmarks as commands that print a table and write JSON lines."""
