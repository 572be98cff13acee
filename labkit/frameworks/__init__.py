"""Processes in which other frameworks train; a rank starts, controls, monitors and ends them."""
