"""A benchmark of transports that carry an array from one process to another."""
