"""Parts of every figure: entries, axes, marks, panels, canvas, and findings."""
