"""Figures of operation graphs: devices, copies, execution order, and input pipelines."""
