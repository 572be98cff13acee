"""`labkit bench …`: benchmarks from the command line, as a table and as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from labkit.common.errors import InvalidInput
from labkit.common.nearest import refuse_unknown
from labkit.common.output import output_option
from labkit.common.quantities import parse_bytes
from labkit.common.terminal import say

if TYPE_CHECKING:
    from labkit.bench.timing import Row
    from labkit.compression import Compressor

AS_JSON = output_option("--json", "file", help="Write rows here, one a line.")
NETWORK = click.option(
    "--network", default=None, help="Emulate this network; default: the machine's own."
)
TIMES = {"median_ms": "median ms", "min_ms": "least", "p90_ms": "p90"}


@click.group()
def bench() -> None:
    """Measure this machine; medians of interleaved repeats, with their spread."""


def numbers(_: click.Context, __: click.Parameter, text: str) -> list[int]:
    """An option's numbers, with commas between them."""
    try:
        return [int(float(part)) for part in text.split(",")]
    except (ValueError, OverflowError):  # OverflowError: inf
        raise click.BadParameter(f"{text!r} is no list of numbers such as 1,2,4") from None


def _sizes(context: click.Context, option: click.Parameter, text: str | None) -> list[int]:
    try:
        return [parse_bytes(part) for part in text.split(",")] if text else []
    except InvalidInput as error:
        raise click.BadParameter(str(error)) from None


@bench.command()
@click.option("--workers", default=2, show_default=True, help="MPI ranks.")
@NETWORK
@click.option("--algorithms", default=None, help="Names with commas; default: all that can run.")
@click.option("--bytes", "sizes", default="1MiB,4MiB,16MiB", callback=_sizes)
@click.option("--repeats", default=5, show_default=True)
@AS_JSON
def collectives(
    workers: int,
    network: str | None,
    algorithms: str | None,
    sizes: list[int],
    repeats: int,
    file: Path | None,
) -> None:
    """Time every allreduce algorithm beside the MPI library's own, or beside its closed form."""
    # In the command: `labkit --help` waits for neither TensorFlow nor ipyparallel.
    from labkit.bench.collectives import measure

    # None: which algorithms can run depends on the network, and `measure` knows.
    names = algorithms.split(",") if algorithms else None
    rows = measure(workers, network, names, sizes, repeats)
    columns = {"algorithm": "algorithm", "bytes": "bytes"} | TIMES
    columns |= {"p99_ms": "p99 of calls", "busbw": "busbw B/s"}
    emulated = {"closed_form_ms": "formula ms", "error": "error"}
    columns |= {"ratio_to_mpi": "ratio"} if network is None else emulated
    _show(rows, columns | {"correct": "correct"}, file)


@bench.command()
@click.option("--rate", default="100Mb,1Gb", show_default=True, help="Bits/s; several with commas.")
@click.option("--algorithms", default="ring,master_worker", show_default=True)
@click.option("--bytes", "sizes", default="64KiB,256KiB,1MiB,4MiB", callback=_sizes)
@click.option("--repeats", default=5, show_default=True)
@AS_JSON
@click.option("--simgrid", is_flag=True, help="Hold flows against SimGrid instead, where it is.")
def link(
    rate: str,
    algorithms: str,
    sizes: list[int],
    repeats: int,
    file: Path | None,
    simgrid: bool,
) -> None:
    """Hold the emulated network against a real rate-limited link (Linux, root, iproute2)."""
    from labkit.bench import meeting
    from labkit.bench.link import measure
    from labkit.frameworks.namespaces import FRAME

    if simgrid:
        from labkit.bench.beside_simgrid import compare

        found = compare()
        columns = {"case": "flows", "by_hand": "by hand s", "labkit": "labkit s"}
        say(_table(found, columns | {"simgrid": "SimGrid s", "error": "error"}))
        _write(found, file)
        return
    rows = measure(rate.split(","), sizes, algorithms.split(","), repeats)
    # Once a rate: the link is the same for all its rows.
    for facts in {row["rate"]: row for row in rows}.values():
        say(
            f"{facts['rate']}: latency {1e6 * float(facts['latency'] or 0):.0f} us as measured; "
            f"payload {facts['payload']} of {FRAME} bytes of a frame; after a pause "
            f"{facts['burst']} bytes pass at line speed, {facts['burst_ms']:.2g} ms less"
        )
    columns = {name: name for name in ("rate", "algorithm", "bytes")}
    for kind, words in (("", "real ms"), ("emulated_", "emulated ms")):
        columns |= {f"{kind}ms" if kind else "median_ms": words}
        columns |= {f"{kind}min_ms": "least", f"{kind}max_ms": "most"}
    columns |= {"closed_form_ms": "formula ms", "error": "error", "correct": "correct"}
    say(_table(rows, columns))
    both = meeting.measure(rate.split(","), repeats)
    columns = {"flow": "two flows at once", "rate": "rate", "median_ms": "real ms"}
    columns |= {"min_ms": "least", "max_ms": "most", "emulated_ms": "emulated ms"}
    say(_table(both, columns | {"max_min_ms": "max-min ms", "error": "error"}))
    _write([*rows, *both], file)


def _names(_: click.Context, __: click.Parameter, text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


@bench.command()
@click.option("--workers", default=2, show_default=True, help="MPI ranks of one thread.")
@click.option(
    "--cases",
    default="mlp-1024,mlp-2048,cnn",
    show_default=True,
    callback=_names,
    help="Models, with commas; there are deep-mlp and embedding, too.",
)
@click.option("--schedules", default="sequential,overlap", show_default=True, callback=_names)
@click.option("--algorithm", default="auto", show_default=True, help="How buckets are summed.")
@NETWORK
@click.option("--repeats", default=5, show_default=True, help="Rounds over everything.")
@click.option("--bucket-bytes", default=4 * 2**20, show_default=True, type=click.IntRange(1))
@click.option(
    "--peer",
    "peers",
    default=None,
    callback=_names,
    help="Other frameworks in turns with it: multi_worker_mirrored,ddp,fsdp,horovod,jax.",
)
@click.option("--where", is_flag=True, help="Also say where the time goes that sequential adds.")
@AS_JSON
def exchange(
    workers: int,
    cases: list[str],
    schedules: list[str],
    algorithm: str,
    network: str | None,
    repeats: int,
    bucket_bytes: int,
    peers: list[str],
    where: bool,
    file: Path | None,
) -> None:
    """What the exchange of gradients adds to a training step, beside other frameworks."""
    from labkit.bench.exchange import measure
    from labkit.bench.peers import beside

    # Before the engines: they take seconds to start.
    _check_exchange(workers, cases, schedules, algorithm, network, repeats, where)
    beside.check(peers, network)
    others = beside.Beside(peers, cases, workers) if peers else None
    given = (workers, cases, schedules, algorithm, network, repeats, bucket_bytes)
    rows = measure(*given, others.turn if others else None, where)
    say(_table([_with_spread(row) for row in rows], EXCHANGE | OVERLAP))
    for row in rows:
        if "why" in row:
            say(f"{row['case']} {row['what']}: {row['algorithm']}, {row['why']}")
    if others:
        found = others.rows(rows)
        if found:
            say(_table([_with_spread(row) for row in found], EXCHANGE | BESIDE))
        for remark in others.remarks:
            say(f"peer {remark}", err=True)
        # A file has them together: `peer` tells them apart.
        rows += found
    _write(rows, file)


def compressors(_: click.Context, __: click.Parameter, text: str | None) -> list[Compressor]:
    """An option's compressors, as YAML has the items of a list."""
    from labkit.common.safe_json import NotPlain
    from labkit.compression import parse
    from labkit.records.safe_yaml import read_plain

    try:
        given = read_plain(f"[{text or ''}]")
    except NotPlain as error:
        raise click.BadParameter(f"{text!r} {error}") from error
    assert isinstance(given, list)  # as brackets say
    return [parse(each) for each in given]


@bench.command()
@click.option(
    "--compressors",
    "chosen",
    callback=compressors,
    help="QSGD,'{name: TopK, threshold: exact}'; default: all that need no fields.",
)
@click.option("--elements", default=5_800_000, show_default=True, help="Of the float32 vector.")
@click.option("--repeats", default=5, show_default=True)
@AS_JSON
def compression(chosen: list[Compressor], elements: int, repeats: int, file: Path | None) -> None:
    """Time every compressor on one thread, beside a copy of the same bytes."""
    from labkit.bench.compression import measure

    rows = measure(chosen or None, elements, repeats)
    errors = ["" if row["error"] is None else f"{row['error']:.2%}" for row in rows]
    columns = {"case": "compressor", "what": "what"} | TIMES
    columns |= {"to_copy": "copies", "bytes": "bytes", "ratio": "ratio", "lost": "error"}
    shown = [row | {"lost": error} for row, error in zip(rows, errors, strict=True)]
    say(_table(shown, columns))
    _write(rows, file)


@bench.command()
@click.option("--workers", default=2, show_default=True, help="Stages, a rank of one thread each.")
@click.option(
    "--schedules", default="gpipe,1f1b,zero_bubble,delayed", show_default=True, callback=_names
)
@click.option("--repeats", default=5, show_default=True)
@AS_JSON
def pipeline(workers: int, schedules: list[str], repeats: int, file: Path | None) -> None:
    """Time pipelines beside one process that takes the same micro-batches."""
    from labkit.bench.pipeline import measure

    rows = measure(workers, schedules, repeats=repeats)
    columns = {"case": "case"} | TIMES | {"one_ms": "one process ms"}
    columns |= {"stage_ms": "ms a stage and micro-batch", "speedup": "speed-up"}
    _show(rows, columns | {"at_most": "at most", "share": "share"}, file)


@bench.command()
@click.option("--kinds", default=None, callback=_names, help="Names with commas; default: all.")
@click.option("--cases", default="mlp,cnn,rnn", show_default=True, callback=_names)
@click.option("--optimizers", default="sgd,adam", show_default=True, callback=_names)
@click.option("--network", default=None, help="A preset: of a real link (Linux, as root).")
@AS_JSON
def tf(
    kinds: list[str],
    cases: list[str],
    optimizers: list[str],
    network: str | None,
    file: Path | None,
) -> None:
    """Hold TensorFlow's own strategies against one process, weight by weight, in float64.

    Ends with an error where weights are more than 1e-12 apart after 20 steps.
    """
    from labkit.bench.frameworks import MOST_APART, experiments, kinds_on, measure
    from labkit.cluster import Cluster
    from labkit.common.errors import LabkitError
    from labkit.strategies import TF_KINDS

    # Before engines start.
    asked = experiments(kinds, cases, optimizers, network)
    if left := [] if kinds else [kind for kind in TF_KINDS if kind not in kinds_on(network)]:
        say(f"left out: {', '.join(left)}, of one process each, which no network joins")
    with Cluster(workers=max(each.ranks for each in asked), limit=300) as cluster:
        rows = [row for row, _ in measure(cluster, asked)]
    shown = [row | {"apart": f"{row['max_abs_difference']:.1e}"} for row in rows]
    columns = {"case": "case", "what": "strategy", "workers": "workers", "apart": "weights apart"}
    columns |= {"correct": "the same"} | TIMES | {"wire_bytes_per_step": "bytes a step"}
    say(_table(shown, columns))
    _write(rows, file)
    if failed := [f"{row['what']} on {row['case']}" for row in rows if not row["correct"]]:
        raise LabkitError(
            f"failed: more than {MOST_APART:g} from one process's weights: {', '.join(failed)}"
        )


@bench.command()
@click.option("--bytes", "sizes", default=None, callback=_sizes, help="Sizes with commas.")
@click.option("--repeats", default=5, show_default=True, help="Rounds over all ways and sizes.")
@click.option("--transports", default=None, callback=_names, help="With commas; default: all.")
@click.option(
    "--namespaces/--no-namespaces",
    default=True,
    show_default=True,
    help="Also over a real link between two of them (Linux, root, iproute2).",
)
@click.option("--rate", default="1Gb", show_default=True, help="Of that link, bits/s.")
@click.option("--train", is_flag=True, help="Time training steps and the time to 90 %, too.")
@AS_JSON
def transport(
    sizes: list[int],
    repeats: int,
    transports: list[str],
    namespaces: bool,
    rate: str,
    train: bool,
    file: Path | None,
) -> None:
    """Time one exchange by gRPC, two-sided, one-sided static and one-sided dynamic messages."""
    from labkit.bench.transports import measuring, predicted, ratios

    wanted = measuring.plan(transports, namespaces=namespaces, rate=rate)
    for sentence in wanted.left_out:
        say(f"left out: {sentence}", err=True)
    sizes = sizes or list(measuring.SIZES)
    rows = measuring.measure(wanted, sizes, repeats)
    columns = {"case": "way", "bytes": "bytes"} | TIMES | {"bandwidth": "B/s", "copies": "copies"}
    columns |= {"processor_ns": "processor ns a byte", "tcp": "bytes by TCP, times"}
    say(_table(rows, columns | {"correct": "bit by bit"}))
    for way in wanted.ways:
        say(f"{way.name}: {len(way.copies)} copies: {'; '.join(way.copies)}")
    for sentence in ratios.sentences(rows):
        say(sentence)
    trained = measuring.train(wanted, repeats=min(repeats, 3)) if train else []
    if trained:
        columns = {"case": "way", "bytes": "bytes of weights"} | TIMES
        say(_table(trained, columns | {"seconds_to_target": "s to 90 %", "accuracy": "accuracy"}))
    rdma = predicted.predict(sizes)
    columns = {"case": "predicted, not measured", "bytes": "bytes", "median_ms": "ms"}
    say(_table(rdma, columns | {"bandwidth": "B/s", "copies": "copies"}))
    _write([*rows, *trained, *rdma], file)


@bench.command()
@click.option("--workers", default="16,64", show_default=True, callback=numbers)
@click.option("--ranks", default=2, show_default=True, help="Of the wall clock.")
@click.option("--repeats", default=5, show_default=True)
@AS_JSON
def servers(workers: list[int], ranks: int, repeats: int, file: Path | None) -> None:
    """Time parameter servers: the virtual clock's loop, and what they add to a step on ranks."""
    from labkit.bench.servers import measure

    columns = {"what": "what", "workers": "workers", "clock": "clock"} | TIMES
    columns |= {"added_ms": "added ms", "ratio": "ratio", "copies": "copies of the weights"}
    columns |= {"in_flight": "gradients in flight"}
    _show(measure(workers, ranks, repeats), columns, file)


@bench.command()
@click.option("--workers", default=2, show_default=True, help="Each on a rank.")
@click.option("--network", default="100Mb", show_default=True, help="Emulated, for the stream.")
@click.option("--repeats", default=5, show_default=True)
@AS_JSON
def averaging(workers: int, network: str, repeats: int, file: Path | None) -> None:
    """Time local steps beside bare ones, and how much of its wire time a stream hides."""
    from labkit.bench.averaging import measure

    columns = {"what": "what", "network": "network"} | TIMES
    columns |= {"added_ms": "added ms", "ratio": "ratio", "own_ms": "no gradient, no update, ms"}
    columns |= {"wire_ms": "wire ms", "delay": "steps late", "hidden": "hidden"}
    _show(measure(workers, repeats, network), columns, file)


@bench.command()
@click.option("--count", default=50, show_default=True, type=click.IntRange(1), help="How many.")
@click.option("--seed", default=0, show_default=True, help="Of the choice among all.")
@click.option("--rooms", default="exchange,compression,strategies", callback=_names)
@AS_JSON
def mutants(count: int, seed: int, rooms: list[str], file: Path | None) -> None:
    """Change labkit's own code a little, many times, and list what no test has noticed."""
    from labkit.bench.mutants import measure

    rows = []
    for row in measure(count, seed, rooms):
        rows.append(row)
        say(f"{row['outcome']}: {row['case']}:{row['line']}: {row['what']}")
    survivors = [row for row in rows if row["outcome"] == "survived"]
    say(f"{len(rows) - len(survivors)} of {len(rows)} were noticed; survivors:")
    say(_table(survivors, {"case": "file", "line": "line", "what": "change"}))
    _write(rows, file)


@bench.command()
@click.option("--listed", default=20_000, show_default=True, type=click.IntRange(1))
@click.option("--compared", default=5_000, show_default=True, type=click.IntRange(1))
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1))
@AS_JSON
def records(listed: int, compared: int, repeats: int, file: Path | None) -> None:
    """Time `ls` and `compare` over thousands of runs, which are made for it and removed."""
    from labkit.bench.records import measure

    rows = list(measure(listed, compared, repeats))
    columns = {"case": "command", "what": "time", "runs": "runs"} | TIMES
    _show(rows, columns | {"processor_ms_per_run": "processor ms a run"}, file)


@bench.command()
@click.option(
    "--notebook",
    default="notebooks/tour.ipynb",
    show_default=True,
    type=click.Path(path_type=Path),
    help="With parameters workers, epochs and seed.",
)
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1))
@AS_JSON
def start(notebook: Path, repeats: int, file: Path | None) -> None:
    """Time first answers: a notebook, cold and with warm engines, a second cell, a sweep's member.

    Engines that `labkit warm` keeps for two ranks are ended first.
    """
    from labkit.bench.start import measure

    def hear(what: str, seconds: list[float]) -> None:
        say(f"{what}: {', '.join(f'{each:.3g}' for each in seconds)} s")

    rows = measure(notebook, repeats, hear)
    _show(rows, {"case": "notebook", "what": "what", "repeats": "repeats"} | TIMES, file)


@bench.command()
@click.argument("folder", metavar="RUNS", type=click.Path(path_type=Path))
@click.option("--counts", default="2,14,200,1000", show_default=True, callback=numbers)
@AS_JSON
def report(folder: Path, counts: list[int], file: Path | None) -> None:
    """Make reports of so many runs, taken from RUNS, and open them in a browser without a network.

    Where RUNS has too few, its records are copied with other learning rates.
    """
    from labkit.bench.pages import measure

    rows = list(measure(folder, counts))
    columns = {"runs": "runs", "copied": "of them copied", "made_s": "made, s"}
    columns |= {"processor_s": "processor, s", "mb": "MB", "first_s": "first figure, s"}
    _show(rows, columns | {"all_s": "all figures, s"}, file)


@bench.command()
@click.option("--cases", default=1_000, show_default=True, type=click.IntRange(0))
@click.option("--records", default=0, show_default=True, help="Odd records, for all readers.")
@click.option("--seed", default=0, show_default=True, help="Of what is generated.")
@AS_JSON
@click.pass_context
def fuzz(context: click.Context, cases: int, records: int, seed: int, file: Path | None) -> None:
    """Meet commands with odd parameters, YAML, notebooks, records and reports.

    With --records, records of each odd shape and size are given to all who read them, in a process
    with limits of time and memory: each must be read, or skipped with one line.
    """
    from labkit.bench.fuzz import measure
    from labkit.bench.odd_records import measure as measure_readers
    from labkit.common.errors import LabkitError

    say(f"seed {seed}")
    rows = list(measure(context.find_root().command, cases, seed)) if cases else []
    if records:
        met = list(measure_readers(records, seed))
        _show([row for row in met if "tried" in row], READINGS, None)
        rows += met
    wrong = [row for row in rows if "what" in row]
    _show([row for row in rows if "exit 0" in row], FUZZ, None)
    _write([row for row in rows if "tried" in row], file)
    for row in wrong:
        say(f"{row['case']}: {row['what']}; {row['command']}; {row['files']}")
    if wrong:
        raise LabkitError(f"{len(wrong)} of {cases + records} cases did not end in order")


READINGS = {name: name for name in ("case", "tried", "read", "skipped", "failed")}
READINGS |= {"slowest_s": "slowest s", "peak_mib": "more MiB"}
FUZZ = {name: name for name in ("case", "tried", "failed", "exit 0", "exit 1", "exit 2")}


@bench.command()
@click.option("--only", "names", default=None, callback=_names, help="Names with commas; or all.")
@click.option(
    "--times", default=1, show_default=True, type=click.IntRange(1), help="Each so often."
)
@click.option("--seed", default=0, show_default=True, help="Of the moments.")
@AS_JSON
def attack(names: list[str], times: int, seed: int, file: Path | None) -> None:
    """Attack real commands of this machine: signals, limits, full disks; what they leave."""
    from labkit.bench.attack import measure

    rows = []
    for row in measure(names, times, seed):
        rows.append(row)
        say(f"{row['case']}: {row['survived']} of {row['tried']}: {row['told']}", err=True)
        if row["wrong"]:
            say(f"  wrong: {row['wrong']}", err=True)
    columns = {"case": f"attack (seed {seed})", "tried": "tried", "survived": "survived"}
    _show(rows, columns | {"seconds": "s until the end", "left": "left", "wrong": "wrong"}, file)


@bench.command()
@click.option("--what", default=None, callback=_names, help="levels,emulated,starts; default: all.")
@click.option("--repeats", type=click.IntRange(1), help="Default: 5, and 20 starts.")
@AS_JSON
def hosts(what: list[str], repeats: int | None, file: Path | None) -> None:
    """Two hosts that this machine makes (Linux, as root): sums, their emulation, starts.

    Ends with an error where a sum is wrong, a start does not come, or an end leaves something.
    """
    from labkit.bench.hosts import PARTS, trouble
    from labkit.common.errors import LabkitError

    refuse_unknown("what", what, PARTS)
    rows = []
    for name in what or PARTS:
        found = PARTS[name].measure(repeats or PARTS[name].repeats)
        say(_table(found, PARTS[name].columns))
        rows += found
    _write(rows, file)
    if failed := [f"{row['case']}: {said}" for row in rows if (said := trouble(row))]:
        raise LabkitError(f"failed: {'; '.join(failed)}")


@bench.command()
@click.option(
    "--what",
    default=None,
    callback=_names,
    help="kills,calls,comebacks,planted,resumes,cost; default: all.",
)
@click.option(
    "--repeats", type=click.IntRange(1), help="Default: 100 kills and resumes, 30 faults."
)
@AS_JSON
def faults(what: list[str], repeats: int | None, file: Path | None) -> None:
    """Kill ranks and trainings at random moments, plant faults anywhere: what comes of it.

    The whole takes about two hours on two cores. Rows that FILE has already are not run again.
    Ends with an error where a run does not go on, a ledger is not exact, a fault is not found, or
    a training that was resumed is another one.
    """
    from labkit.bench.faults.parts import PARTS, summary, trouble
    from labkit.common.errors import LabkitError

    refuse_unknown("what", what, PARTS)
    there = file is not None and file.exists()
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file and there else []
    for name in what or PARTS:
        for row in PARTS[name].measure(repeats or PARTS[name].repeats, rows):
            rows.append(row)
            say(" ".join(f"{k}={_shown(k, v)}" for k, v in row.items() if k != "bench"), err=True)
            if file is not None:  # whatever ends it
                _keep(rows, file)
    columns = {"what": "what", "network": "where", "count": "count"}
    columns |= {good: good for part in PARTS.values() for good in (*part.good, *part.numbers)}
    _show(summary(rows), columns, None)
    if failed := trouble(rows):
        raise LabkitError(f"failed: {'; '.join(failed)}")


@bench.command()
@click.option(
    "--calibration",
    "path",
    type=click.Path(path_type=Path),
    help="What `labkit calibrate -o FILE` has written; default: measured first, beside the rows.",
)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--only", default="", help="Settings of whose name this is a part: '2 ranks'.")
@output_option("--figure", help="Draw the diagonal, as HTML.")
@AS_JSON
def forecasts(
    path: Path | None, repeats: int, only: str, figure: Path | None, file: Path | None
) -> None:
    """Hold forecasts against runs: settings and forecasts are written down before any run starts.

    76 settings: 64 of two ranks, the others of one, of more than cores, and of two hosts; about 40
    minutes. Rows that FILE has already are not run again.
    """
    from labkit.bench.forecasts.foreseen import known
    from labkit.bench.forecasts.held import compared, summary, verify, worst
    from labkit.bench.forecasts.measured import measure
    from labkit.bench.forecasts.settings import settings
    from labkit.common.errors import InvalidInput, LabkitError

    if not (chosen := settings(only)):
        cases = "; ".join(dict.fromkeys(each.case for each in settings()))
        raise InvalidInput(f"only={only!r} is in no case; there are: {cases}")

    there = file is not None and file.exists()
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file and there else []
    for row in measure(chosen, repeats, rows, known(chosen, path, file)):
        rows.append(row)
        say(" ".join(f"{k}={_shown(k, v)}" for k, v in row.items() if k != "bench"), err=True)
        if file is not None:  # whatever ends it
            _keep(rows, file)
    for row in (row for row in rows if row["what"] == "skipped"):
        say(f"skipped: {row['case']}: {row['reason']}")
    columns = {"case": "case", "network": "network", "predicted_ms": "predicted ms"}
    columns |= {"measured_ms": "measured ms", "least_ms": "least", "most_ms": "most"}
    columns |= {"error": "error", "held": "held", "group": "group"}
    _show(compared(rows), columns, None)
    errors = {f"error_{name}": f"{name} error" for name in ("median", "p90", "bias")}
    _show(
        summary(rows), {"group": "group", "settings": "settings"} | errors | {"held": "held"}, None
    )
    if figure is not None:
        from labkit.figures import forecast_diagonal
        from labkit.figures.kit.canvas import html_page
        from labkit.records.store import write_atomically

        figure.parent.mkdir(parents=True, exist_ok=True)
        page = html_page(forecast_diagonal(compared(rows), str(rows[0]["calibration"])))
        write_atomically(figure, page)
    say("the worst:")
    _show(worst(rows), columns, None)
    if wrong := verify(rows):
        raise LabkitError(f"the rows prove nothing: {'; '.join(wrong)}")


EXCHANGE = {
    "case": "case",
    "what": "what",
    **TIMES,
    "limit_ms": "limit",
    "added": "added ms (least to most)",
    "same_weights": "same weights",
}
BESIDE = {"ours_to_theirs": "added by ours : by theirs", "version": ""}
OVERLAP = {"saved": "ms saved of what an ideal line would", "recording": "recording"}


def _with_spread(row: Row) -> Row:
    """The row with what it adds to the local step, and its spread, in one cell."""
    more: Row = {}
    if row.get("added_ms") is not None:
        least, most = row["added_min_ms"], row["added_max_ms"]
        more["added"] = f"{row['added_ms']:.3g} ({least:.3g} to {most:.3g})"
    if "saved_ms" in row:
        least, most, ideal = row["saved_min_ms"], row["saved_max_ms"], row["ideal_saving_ms"]
        more["saved"] = f"{row['saved_ms']:.3g} ({least:.3g} to {most:.3g}) of {ideal:.3g}"
    if "recording_share" in row:
        more["recording"] = f"{row['recording_share']:.2%} of the step"
    return row | more


def _check_exchange(
    workers: int,
    cases: Sequence[str],
    schedules: Sequence[str],
    algorithm: str,
    network: str | None,
    repeats: int,
    where: bool,
) -> None:
    from labkit.bench.steps import WORD_CASES
    from labkit.common.errors import InvalidInput
    from labkit.communicator import ALGORITHMS, refuse_unmetered
    from labkit.exchange import SCHEDULES

    if workers < 2 or repeats < 1:
        raise InvalidInput(
            f"workers={workers}, repeats={repeats}: an exchange wants 2 workers or more, and a "
            "median 1 repeat or more"
        )
    for field, values, allowed in (
        ("schedule", schedules, SCHEDULES),
        ("algorithm", [algorithm], ("auto", *ALGORITHMS)),
    ):
        refuse_unknown(field, values or [""], allowed)
    words = [name for name in cases if name in WORD_CASES]
    own = [name for name in schedules if SCHEDULES[name].into_next]
    if words and own:
        raise InvalidInput(
            f"schedule={own[0]!r} updates dense layers one by one; {words[0]!r} has rows: leave "
            "one of them out"
        )
    if where and "sequential" not in schedules:
        raise InvalidInput("--where is about schedule sequential, which --schedules leaves out")
    if where and words:
        raise InvalidInput(f"--where is about dense gradients; {words[0]!r} has rows: leave it out")
    refuse_unmetered(algorithm, network)


def _show(rows: Sequence[Row], columns: dict[str, str], file: Path | None) -> None:
    say(_table(rows, columns))
    _write(rows, file)


def _table(rows: Sequence[Row], columns: dict[str, str]) -> str:
    from labkit.jobs.listing import table

    cells = [[_shown(name, row.get(name)) for name in columns] for row in rows]
    return table(cells, list(columns.values()))


def _shown(name: str, value: str | float | None) -> str:
    if value is None or isinstance(value, bool):
        # Loud: a benchmark of a wrong sum is worth nothing.
        return {True: "yes", False: "NO", None: ""}[value]
    if isinstance(value, str):
        return value
    if name.startswith("error"):
        return f"{value:+.1%}"
    if isinstance(value, int):
        return str(value)
    # Three figures in both forms; bandwidths are too long without a power of ten.
    return f"{value:.3g}" if value < 1e5 else f"{value:.2e}"


def _write(rows: Sequence[Row], file: Path | None) -> None:
    if file is None:
        return
    _keep(rows, file)
    say(f"rows: {file}")


def _keep(rows: Sequence[Row], file: Path) -> None:
    """One object a line, whole or not at all."""
    from labkit.records.store import write_atomically

    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(json.dumps(row) + "\n" for row in rows))
