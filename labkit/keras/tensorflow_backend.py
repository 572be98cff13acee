"""Check that Keras uses TensorFlow, run before the import of Keras, which fixes the backend."""

from labkit.common.keras_settings import refuse_other_backend

refuse_other_backend()
