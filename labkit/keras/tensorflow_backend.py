"""Check that Keras uses TensorFlow; runs before Keras is imported and selects its backend."""

from labkit.common.keras_settings import refuse_other_backend

refuse_other_backend()
