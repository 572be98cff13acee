"""Graphs of operations, their devices and copies, and the order in which they ran."""
