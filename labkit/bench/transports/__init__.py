"""A benchmark of transports that send an array from one process to another."""
