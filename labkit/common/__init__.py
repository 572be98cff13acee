"""Basic helpers that all packages of labkit may import: errors, validation, paths, units, HTML."""
