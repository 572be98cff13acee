"""What is kept of a run: written whole or not at all, read with every doubt said aloud."""

from labkit.records import export

__all__ = ["export"]
