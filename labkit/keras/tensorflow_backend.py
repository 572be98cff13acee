"""A check that Keras uses TensorFlow, made before the import of Keras selects a backend."""

from labkit.common.keras_settings import refuse_other_backend

refuse_other_backend()
