"""Figures of the methods themselves: where they stand in the field."""
