"""Exports of runs: to CSV or Parquet tables, to MLflow, and to TensorBoard."""

from labkit.records.export.mlflow import to_mlflow
from labkit.records.export.tabular import KINDS, export
from labkit.records.export.tensorboard import to_tensorboard

__all__ = ["KINDS", "export", "to_mlflow", "to_tensorboard"]
