"""What runs reached and how fast: curves, speeds, and any of their numbers over any other."""
