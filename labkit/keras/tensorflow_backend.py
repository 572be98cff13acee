"""A check, made before Keras is imported and selects a backend, that Keras uses TensorFlow."""

from labkit.common.keras_settings import refuse_other_backend

refuse_other_backend()
