"""Time and bytes of a step: computing, compressing, waiting, and the wire."""
