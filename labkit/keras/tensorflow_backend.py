"""A check that Keras uses TensorFlow, which runs before Keras is imported and selects a backend."""

from labkit.common.keras_settings import refuse_other_backend

refuse_other_backend()
