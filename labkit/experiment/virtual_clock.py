"""`VirtualClock`: modelled times for an experiment whose workers one process simulates."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator

from labkit.common.quantity_fields import PositiveSeconds, Seconds
from labkit.common.validated import Checked
from labkit.network import ComputeTime


class VirtualClock(Checked):
    """Modelled compute times, message delays and failures of an experiment on the virtual clock.

    On the virtual clock one process computes the real gradients of all workers. A `VirtualClock`
    supplies the duration of each computation, and the network model supplies the duration of each
    message.

    Workers, servers and steps are numbered from 0. A time is a number of seconds, or a text such as
    "5ms".

    Args:
        compute_time: Time of one gradient. The value of `compute_time` is a `ComputeTime`, a
            constant time, or a list of times. A list contains the times of successive steps, and
            repeats cyclically. If `compute_time` is None, the time of one gradient is measured
            once, before training.
        message_delays: Tuples (worker, step, seconds). Each tuple delays the gradient of one worker
            and step by a number of seconds.
        update_order: Tuples (server, worker, step), in the order in which servers apply gradients.
            If empty, servers apply gradients in the order of arrival.
        worker_failures: A dict of worker -> seconds, or tuples (worker, seconds). A worker fails
            this many seconds after the start, and loses its unfinished work. Training continues
            without failed workers on asynchronous servers, and on synchronous servers with enough
            backup workers.

    Example:
        >>> VirtualClock(compute_time=0.01, worker_failures={1: 2.5}).worker_failures
        ((1, 2.5),)
    """

    compute_time: ComputeTime | None = None
    message_delays: tuple[tuple[int, int, PositiveSeconds], ...] = ()
    update_order: tuple[tuple[int, int, int], ...] = ()
    worker_failures: tuple[tuple[int, Seconds], ...] = ()

    @field_validator("compute_time", mode="before")
    @classmethod
    def _parse_compute_time(cls, value: Any) -> Any:
        return ComputeTime.parse(value)

    @field_validator("worker_failures", mode="before")
    @classmethod
    def _parse_worker_failures(cls, value: Any) -> Any:
        return tuple(value.items()) if isinstance(value, dict) else value
