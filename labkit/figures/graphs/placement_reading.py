"""What a notebook on placement found, in sentences made of its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.common.errors import InvalidInput
from labkit.common.units import bytes_text, plural
from labkit.figures.graphs.break_even import break_even_finding
from labkit.figures.graphs.placements import placement_table
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.simulate.placement import Machine, Plan, all_on_one, list_schedule
from labkit.worker.devices import Examined, Measured

if TYPE_CHECKING:
    import pandas as pd

LIST, ONE = "list scheduling", "all on one"


def placer_reading(found: Examined) -> Markdown:
    """What TensorFlow's own placer did with scopes, with soft placement and without a kernel."""
    return sentences([*_scopes(found), *_kernels(found), *_rules(found)])


def placement_reading(
    found: Examined,
    plans: Mapping[str, Sequence[Plan]],
    measured: Sequence[Measured],
    memory_share: float,
) -> Markdown:
    """How the placements compare, predicted and measured, and whether they are the same step.

    Args:
        found: of which the plans were made.
        plans, measured: as `placement_table`.
        memory_share: of all bytes, that each device has room for in the plan with a limit.
    """
    table = placement_table(plans, measured)
    first = next(iter(plans))
    own = {row["rule"]: row for row in _rows(table[table["link"] == first])}
    told = [_predicted(link, _rows(part)) for link, part in table.groupby("link", sort=False)]
    told.append(_limited(found, plans[first][0].machine, memory_share))
    if measured:
        told += [_copies(plans[first], measured), _same(measured), _measured(own)]
    told.append(break_even_finding(found.speeds))
    return sentences([*told, _answer(own)])


def _scopes(found: Examined) -> Iterator[Finding]:
    on = {each.name: each for each in found.scoped.operations}
    towers = {_tower(name): each.device for name, each in on.items() if name.startswith("tower")}
    asked = {
        name: towers[_tower(name.removeprefix("gradient_tape/"))]
        for name in on
        if name.startswith("gradient_tape/tower")
    }
    apart = [name for name, device in asked.items() if on[name].device != device]
    yield Finding(
        f"Device scopes around the towers: {len(apart)} of {len(asked)} gradient operations of "
        "towers ran on another device than their tower, as the tape records no scope"
    )
    named = {name: device for name, device in found.log.items() if name in on}
    wrong = sorted(name for name, device in named.items() if on[name].device != device)
    agree = f"all but {', '.join(wrong[:3])}" if wrong else "each"
    yield Finding(
        f"TensorFlow's placement log of this step names {len(named)} of the {len(on)} operations "
        f"that ran, and {agree} ran where it says; the others were made after placing, by the "
        "optimizer or where devices meet"
    )


def _kernels(found: Examined) -> Iterator[Finding]:
    types = {str(row["device"]): str(row["types"]).split(", ") for row in found.kernels}
    for kind in ("float32", "int32"):
        have = [device for device, known in types.items() if kind in known]
        lack = [device for device in types if device not in have]
        without = f", none for {' and '.join(lack)}" if lack else ""
        yield Finding(
            f"MatMul of {kind}: the registry has a kernel for {' and '.join(have) or 'no device'}"
            f"{without}"
        )


def _rules(found: Examined) -> Iterator[Finding]:
    for row in found.rules:
        how = "soft placement" if row["soft"] else "strict placement"
        asked = f"{row['question']}, {row['op']} asked onto {row['asked']}, {how}"
        refused = row["ran_on"] == "nowhere"
        said = f"refused: {_first(str(row['error']))}" if refused else f"ran on {row['ran_on']}"
        yield Finding(f"{asked}", said=(said,))


def _predicted(link: str, rows: Sequence[Mapping[str, Any]]) -> Finding:
    by = {row["rule"]: row for row in rows}
    others = [f"{name} {row['predicted_ms']:.3g} ms" for name, row in by.items() if name != LIST]
    found = by[LIST]
    bound = found["bound_ms"]
    return Finding(
        f"Predicted, {link}: **{LIST}** {found['predicted_ms']:.3g} ms with "
        f"{plural(round(found['copies']), 'copy').replace('copys', 'copies')} of "
        f"{bytes_text(found['copied_bytes'])} in all",
        said=(*others, f"no plan can be shorter than {bound:.3g} ms"),
    )


def _limited(found: Examined, machine: Machine, share: float) -> Finding:
    total = sum(task.bytes for task in found.tasks.tasks)
    small = Machine(
        machine.devices, machine.latency, machine.bandwidth, share * total, machine.dispatch
    )
    said = []
    for name, make in ((LIST, list_schedule), (ONE, all_on_one)):
        try:
            said.append(f"{name} fits, {1e3 * make(found.tasks, small).makespan:.3g} ms")
        except InvalidInput:
            said.append(f"{name} does not fit")
    return Finding(f"With room for a share of {share:g} of all bytes on each device", said=(*said,))


def _copies(plans: Sequence[Plan], measured: Sequence[Measured]) -> Finding:
    planned = {plan.name: len(plan.copies) for plan in plans}
    other = [each.name for each in measured if each.copies != planned[each.name]]
    if other:
        return Finding(f"TensorFlow sent other copies than planned with {', '.join(other)}")
    return Finding(
        "TensorFlow sent as many tensors and signals between devices as each plan says, "
        f"from {min(planned.values())} to {max(planned.values())} a step"
    )


def _same(measured: Sequence[Measured]) -> Finding:
    first = measured[0]
    other = [each.name for each in measured if list(each.losses) != list(first.losses)]
    if not other:
        return Finding(
            f"The same step: the first {len(first.losses)} losses are equal in all bits, wherever "
            "it is placed"
        )
    return Finding(f"Not the same step: the losses of {', '.join(other)} differ from {first.name}")


def _measured(own: Mapping[str, Mapping[str, Any]]) -> Finding:
    said = [
        f"{name} {row['measured_ms']:.3g} ms (spread {row['measured_low_ms']:.3g} ms to "
        f"{row['measured_high_ms']:.3g} ms)"
        for name, row in own.items()
    ]
    return Finding("Measured on logical devices, which share the cores", said=(*said,))


def _answer(own: Mapping[str, Mapping[str, Any]]) -> Finding:
    best = own[LIST]
    beaten = [name for name, row in own.items() if row["predicted_ms"] > best["predicted_ms"]]
    against = f"a shorter step than {' and '.join(beaten)}" if beaten else "no shorter step"
    head = f"A cost model of {len(own)} rules' plans promises **{LIST}** {against}"
    if ONE not in own or best["measured_ms"] != best["measured_ms"]:
        return Finding(head)
    if best["measured_high_ms"] < own[ONE]["measured_low_ms"]:
        kept = "measured steps keep that against all on one, beyond their spread"
    elif best["measured_low_ms"] > own[ONE]["measured_high_ms"]:
        kept = "measured steps are longer than all on one, beyond their spread"
    else:
        kept = "measured steps and those of all on one do not differ beyond their spread"
    return Finding(head, said=(f"on the cores of this machine, {kept}",))


def _tower(name: str) -> str:
    return name.partition("/")[0]


def _first(error: str) -> str:
    """The first words of TensorFlow's error, up to where it names its own functions."""
    return error.partition(" [Op:")[0].partition(" used by")[0].rstrip(".")


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = table.to_dict("records")
    return found
