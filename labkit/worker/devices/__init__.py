"""Devices of one process: what TensorFlow places where, what a step does there, and how fast."""

from labkit.worker.devices.asked import Asked
from labkit.worker.devices.asking import carry_out, examine

__all__ = ["Asked", "carry_out", "examine"]
