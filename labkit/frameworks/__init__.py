"""Processes in which other frameworks train; a rank starts, monitors and ends these processes."""
