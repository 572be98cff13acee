"""Basic helpers that every package of labkit may import: errors, validation, paths, units, HTML."""
