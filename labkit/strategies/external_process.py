"""What strategies have in common whose model is trained in processes of another framework."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pydantic import Field

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.communicator import Communicator
from labkit.frameworks.child import Child
from labkit.frameworks.namespaces import ADDRESSES, inside, rate_limited_link, require_means
from labkit.frameworks.private_network import private_network
from labkit.frameworks.tcp_counters import Wires
from labkit.network import Network
from labkit.strategies.strategy import ExperimentSpec, Session

if TYPE_CHECKING:
    import keras

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")  # over rows, without weights
ENDING = 1.0  # s, in which the end of a process is seen, although its peers were quicker
# Left out of records where it is not given, so that hashes stay.
TRUSTED: bool = Field(False, exclude_if=operator.not_)
LATENCY = 1e-3  # s; more than that a link within a machine does not stand for


def refuse_elsewhere(name: str, experiment: ExperimentSpec, linked: bool = False) -> None:
    """Refuse what such processes do not do, of a strategy of this name, before any rank starts.

    Args:
        name: of the strategy.
        experiment: what is asked for.
        linked: whether processes can be put at the ends of a real link.
    """
    given = {
        "network": (
            None if linked else experiment.network,
            "its processes talk over this machine's own",
        ),
        "slow": (experiment.slowed, "labkit slows down its own ranks only"),
        "callbacks": (experiment.callbacks, "the model is trained in another process"),
    }
    for field, (value, why) in given.items():
        if value:
            raise InvalidInput(f"{field} is nothing to {name}: {why}; leave it out")
    if experiment.feed == "scatter":
        raise InvalidInput("feed='scatter' is read by labkit's ranks; use feed='shard'")
    if experiment.rows is None:
        raise InvalidInput(
            f"{name}'s processes read rows by number, which a callable data set has not; "
            "give arrays (x, y) or a named data set"
        )
    rest = experiment.rows % experiment.batch_size or experiment.batch_size
    if rest < experiment.workers:
        raise InvalidInput(
            f"the last of the batches of batch_size={experiment.batch_size} has {rest} of "
            f"{experiment.rows} rows, fewer than workers={experiment.workers}; give another "
            "batch_size"
        )


def refuse_unweighted(model: keras.Model) -> None:
    """Refuse a compiled model whose losses of replicas do not add up by their rows."""
    import keras

    from labkit.model_parallel.functional import is_masked

    for loss in keras.tree.flatten(model.loss):
        if (how := getattr(loss, "reduction", MEANS[0])) not in MEANS:
            raise InvalidInput(
                f"loss {loss.name!r} has reduction={how!r}, but the losses of replicas are "
                "weighted by their rows, as means over these; use reduction='sum_over_batch_size'"
            )
    if any(map(is_masked, getattr(model, "outputs", None) or ())):
        raise InvalidInput(
            "the model's outputs carry a mask, and its loss is a mean over what that leaves in, "
            "but the losses of replicas are weighted by their rows; use labkit's AllReduce, which "
            "counts what masks leave in"
        )


def refuse_unlinked(network: Network) -> None:
    """Refuse a network that no real link of this machine can stand for, before any rank starts."""
    more = ("jitter", "hosts", "links", "slow")
    given = [name for name in more if getattr(network, name)]
    given += [f"latency={network.latency:g} s"] if network.latency > LATENCY else []
    if given:
        raise InvalidInput(
            f"network with {' and '.join(given)}: processes of other frameworks talk over a real "
            f"link, which has a bandwidth alone; give Network(latency=0, bandwidth=<bytes/s>), or "
            f"a preset of at most {LATENCY:g} s"
        )
    require_means()


def linked(session: Session, ended: ExitStack) -> dict[str, Sequence[str]]:
    """The ends of a real link, as the experiment has a network (collective).

    Args:
        session: of the rank.
        ended: when this is closed, the link is removed.

    Returns:
        address -> the words before a command that runs there.
    """
    network, communicator = Network.parse(session.experiment.network), session.communicator
    if network is None:
        return {}
    made = None
    if communicator.rank == 0:
        made = ended.enter_context(rate_limited_link(round(8 * network.bandwidth)))
    names = communicator.share(made, what="the ends of the real link")
    return {address: inside(name) for address, name in zip(ADDRESSES, names, strict=True)}


def enclosed(session: Session, ended: ExitStack, what: str, trusted: bool) -> Sequence[str]:
    """The words before the commands of a run's processes, which nobody else reaches (collective).

    Args:
        session: of the rank.
        ended: when this is closed, their network is given up.
        what: listens, of which framework.
        trusted: whether they may be reached nevertheless.

    Raises:
        LabkitError: they may not, and this system has no network for them.
    """
    made = None
    if session.communicator.rank == 0:
        made = ended.enter_context(private_network(what, trusted))
    words = session.communicator.share(made, what="the network of the framework's processes")
    return words or ()


def refuse_hosts(name: str, communicator: Communicator, instead: str) -> None:
    """Refuse ranks on several hosts."""
    if not communicator.patience.on_one_host:
        raise InvalidInput(
            f"{name} starts its processes on one host, but these ranks have several; {instead}"
        )


def train_elsewhere(
    session: Session,
    child: Child,
    others: Callable[[], Mapping[str, int]] = dict,
    mend: Callable[[], None] = lambda: None,
    networks: Sequence[Sequence[str]] = (),
) -> dict[str, JSON]:
    """Ask a rank's process for steps, and count the bytes between all ranks' processes.

    Args:
        session: of the rank.
        child: its process, ready for "step", and for "weights", which are then the model's.
        others: the tasks of other processes that this rank has started, and what they are now.
        mend: starts those anew that have ended; called now and then.
        networks: in which these processes talk, if not in this one's: words before a command there.

    Its answer to "step" is a loss, or a loss and the seconds that the step took there: what is
    spent on asking and counting is none of the step's.

    Returns:
        For the record: `processes` by task, `sent_bytes` from task to task in `counted_steps`: all
        but the first, with which connections, graphs and first weights travel.
    """
    communicator = session.communicator
    own = {child.name: child.pid} | dict(others())
    everyone: dict[str, int] = {}
    for tasks in communicator.allgather(own, "the processes of other frameworks' tasks"):
        everyone |= tasks
    wires = Wires(everyone, networks)
    steps, before, traffic, clock = 0, 0, communicator.traffic, communicator.clock
    wires.look(own, counts=False)

    def meanwhile() -> None:
        mend()
        wires.tasks |= others()

    def ask(what: str) -> Any:
        try:
            return child.ask(what, meanwhile=meanwhile)
        except LabkitError:
            # What it stumbled over may be that another one has ended, a moment ago: that is told.
            clock.sleep(ENDING)
            mend()
            raise

    def step(x: object, y: object, weight: object) -> float:
        nonlocal steps, before
        start = clock.now()
        meanwhile()
        asked = clock.now()
        answer = ask("step")
        timed = answer if isinstance(answer, tuple) else (answer, clock.now() - asked)
        before, last = wires.look(own), before
        traffic.wire_bytes += before - last
        if steps == 0:
            wires.forget()
            before = 0
        steps += 1
        traffic.aside_seconds += clock.now() - start - timed[1]
        return float(timed[0])

    def collect() -> None:
        wires.look(own)  # the kernel learns late that the last bytes of a step have come
        session.model.set_weights(ask("weights"))
        wires.look(own, counts=False)

    session.loop(step, collect)
    sent: dict[str, JSON] = {}
    for rows in communicator.allgather(wires.matrix(own), "the bytes of these tasks"):
        sent |= rows
    return {"processes": dict(wires.tasks), "sent_bytes": sent, "counted_steps": steps - 1}
