"""Devices of one process: what TensorFlow places where, what a step does there, and how fast."""

from labkit.worker.devices.client import carry_out, examine
from labkit.worker.devices.request import DeviceRequest

__all__ = ["DeviceRequest", "carry_out", "examine"]
