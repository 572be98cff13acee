"""Sweeps: resumable sets of jobs that run one notebook with many combinations of values."""
