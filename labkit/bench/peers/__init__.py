"""Benchmarks of other installed frameworks ("peers") with the same training steps."""
