"""Runs for other tools: a table as CSV or Parquet, and the stores of MLflow and TensorBoard."""

from labkit.records.export.mlflow import to_mlflow
from labkit.records.export.tabular import KINDS, export
from labkit.records.export.tensorboard import to_tensorboard

__all__ = ["KINDS", "export", "to_mlflow", "to_tensorboard"]
