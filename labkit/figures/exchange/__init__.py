"""Where the time and the bytes of a step go: computing, compressing, waiting, the wire."""
