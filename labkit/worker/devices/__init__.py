"""Placement of a training step's operations on logical devices of one TensorFlow process."""

from labkit.worker.devices.client import carry_out, examine
from labkit.worker.devices.request import DeviceRequest

__all__ = ["DeviceRequest", "carry_out", "examine"]
