"""Communicator: what ranks say to each other, metered and with a limit on every wait."""

from labkit.communicator.algorithms import ALGORITHMS, check_algorithm, refuse_unmetered
from labkit.communicator.clock import WALL, Clock, WallClock
from labkit.communicator.communicator import Communicator
from labkit.communicator.computing import computing
from labkit.communicator.eager import Slots
from labkit.communicator.fault_injector import Injector
from labkit.communicator.mailbox import Letter, Mailbox, Route
from labkit.communicator.numbers import scale
from labkit.communicator.rendezvous import Parcels
from labkit.communicator.shared_memory import Aside
from labkit.communicator.sparse import merged
from labkit.communicator.status_board import HostSilent, Mismatch, RankDied, RankFailed, WaitTooLong
from labkit.communicator.traffic import Traffic
from labkit.communicator.transports import TRANSPORTS, Carrier, Transport, carrier
from labkit.communicator.window import Window
from labkit.communicator.wire import Corrupted
from labkit.communicator.world import alone, join, world

__all__ = [
    "ALGORITHMS",
    "TRANSPORTS",
    "WALL",
    "Aside",
    "Carrier",
    "Clock",
    "Communicator",
    "Corrupted",
    "HostSilent",
    "Injector",
    "Letter",
    "Mailbox",
    "Mismatch",
    "Parcels",
    "RankDied",
    "RankFailed",
    "Route",
    "Slots",
    "Traffic",
    "Transport",
    "WaitTooLong",
    "WallClock",
    "Window",
    "alone",
    "carrier",
    "check_algorithm",
    "computing",
    "join",
    "merged",
    "refuse_unmetered",
    "scale",
    "world",
]
