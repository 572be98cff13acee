"""Test that the communication thread requests short time slices from the operating system."""

from __future__ import annotations

import platform
import threading
import time

import pytest

from labkit.exchange.comm_thread import wake_promptly


def _release() -> tuple[int, ...]:
    return tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


@pytest.mark.skipif(
    platform.system() != "Linux" or _release() < (6, 12) or platform.machine() != "x86_64",
    reason="slices of one's own came with Linux 6.12",
)
def test_linux_grants_short_slices_to_the_thread_that_asks() -> None:
    granted: list[bool] = []
    thread = threading.Thread(target=lambda: granted.append(wake_promptly()))
    thread.start()
    thread.join()
    assert granted == [True]


def test_asking_does_no_harm_anywhere() -> None:
    def ask() -> None:
        wake_promptly()
        time.sleep(0.001)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
