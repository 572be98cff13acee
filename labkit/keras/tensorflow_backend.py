"""Imported first: Keras takes its backend when it is imported, and TensorFlow's is needed."""

from labkit.common.keras_settings import refuse_other_backend

refuse_other_backend()
