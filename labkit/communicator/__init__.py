"""Messages and collectives between MPI ranks, with traffic metering and a timeout of every wait."""

from labkit.communicator.clock import WALL, Clock, WallClock
from labkit.communicator.communicator import Communicator, computing
from labkit.communicator.fault_injector import Injector
from labkit.communicator.mailbox import Letter, Mailbox, Route
from labkit.communicator.one_sided import EagerMailbox, RendezvousMailbox, Window
from labkit.communicator.reductions import ALGORITHMS, refuse_unmetered, validate_algorithm
from labkit.communicator.shared_memory import SeparateBuffers
from labkit.communicator.sparse import merged
from labkit.communicator.status_board import HostSilent, Mismatch, RankDied, RankFailed, WaitTooLong
from labkit.communicator.transports import TRANSPORTS, AnyMailbox, Transport, open_mailbox
from labkit.communicator.wait_policy import Traffic
from labkit.communicator.wire import Corrupted, scale
from labkit.communicator.world import join, single_rank, world

__all__ = [
    "ALGORITHMS",
    "TRANSPORTS",
    "WALL",
    "AnyMailbox",
    "Clock",
    "Communicator",
    "Corrupted",
    "EagerMailbox",
    "HostSilent",
    "Injector",
    "Letter",
    "Mailbox",
    "Mismatch",
    "RankDied",
    "RankFailed",
    "RendezvousMailbox",
    "Route",
    "SeparateBuffers",
    "Traffic",
    "Transport",
    "WaitTooLong",
    "WallClock",
    "Window",
    "computing",
    "join",
    "merged",
    "open_mailbox",
    "refuse_unmetered",
    "scale",
    "single_rank",
    "validate_algorithm",
    "world",
]
