"""Sweeps: jobs that run one notebook with many parameter values, and that can be resumed."""
