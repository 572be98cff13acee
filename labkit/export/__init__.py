"""Runs for other tools: a table as CSV or Parquet, and the stores of MLflow and TensorBoard."""

from labkit.export.mlflow import to_mlflow
from labkit.export.table import KINDS, export
from labkit.export.tensorboard import to_tensorboard

__all__ = ["KINDS", "export", "to_mlflow", "to_tensorboard"]
