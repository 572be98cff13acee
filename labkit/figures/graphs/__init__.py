"""Graphs of operations: what feeds what, on which device, and what is copied between devices."""
