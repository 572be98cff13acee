"""Building blocks of all figures: entries, axes, marks, panels, canvas, and findings."""
