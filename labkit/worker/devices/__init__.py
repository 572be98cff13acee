"""Devices of one process: what TensorFlow places where, what a step does there, and how fast."""

from labkit.worker.devices.asked import Asked, Examined, Measured
from labkit.worker.devices.asking import carry_out, examine

__all__ = ["Asked", "Examined", "Measured", "carry_out", "examine"]
