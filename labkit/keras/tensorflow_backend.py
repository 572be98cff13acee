"""Checks before the import of Keras: TensorFlow is installed, and is the backend of Keras."""

from labkit.common.imports import require
from labkit.common.keras_settings import refuse_other_backend

require("train")
refuse_other_backend()
