"""Processes of other frameworks: fresh ones, which a rank starts, asks, watches and ends."""
