"""What a notebook on placement found, in sentences made of its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.common.units import bytes_text
from labkit.figures.graphs.break_even import break_even_finding
from labkit.figures.graphs.placements import placement_table
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.records.placed import Examined, Measured
from labkit.simulate.placement import Plan

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
) -> Markdown:
    """How the placements compare, predicted and measured, and whether they are the same step.

    Args:
        found: of which the plans were made.
        plans, measured: as `placement_table`.
    """
    table = placement_table(plans, measured)
    first = next(iter(plans))
    own = {row["rule"]: row for row in _rows(table[table["link"] == first])}
    told = [
        _predicted(link, _rows(part), list(own)) for link, part in table.groupby("link", sort=False)
    ]
    if measured:
        told += [_copies(plans[first], measured), _same(measured), _measured(own)]
    told.append(break_even_finding(found.speeds))
    return sentences([*told, _answer(own, _dear(table))])


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
        f"towers ran on another device than their tower{', as the tape has no scope' * bool(apart)}"
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
    """A sentence a question; both ways of placing where their answers differ."""
    asked: dict[str, dict[str, list[str]]] = {}
    for row in found.rules:
        refused = row["ran_on"] == "nowhere"
        said = f"refused ({_first(str(row['error']))})" if refused else f"ran on {row['ran_on']}"
        what = f"{row['question']}, {row['op']} asked onto {row['asked']}"
        way = "soft placement" if row["soft"] else "strict placement"
        asked.setdefault(what, {}).setdefault(said, []).append(way)
    for what, answers in asked.items():
        told = [f"with {' and '.join(ways)} {said}" for said, ways in answers.items()]
        yield Finding(f"{what[0].upper()}{what[1:]}", said=(*told,))


def _predicted(link: str, rows: Sequence[Mapping[str, Any]], rules: Sequence[str]) -> Finding:
    """Of a link; the rules that have no plan there did not fit the memory."""
    told = [_promise(row) for row in rows if row["rule"] != LIST]
    lost = [name for name in rules if name not in [row["rule"] for row in rows]]
    told += [f"without room: {', '.join(lost)}"] if lost else []
    best = next((row for row in rows if row["rule"] == LIST), None)
    if best is not None:
        copies = round(best["copies"])
        told.insert(0, f"**{_promise(best)}** with {copies} copied tensors or signals")
        told[0] += f" of {bytes_text(best['copied_bytes'])} in all" if copies else ""
    bound = rows[0]["bound_ms"]
    return Finding(f"Predicted, {link}", said=(*told, f"no plan is shorter than {bound:.3g} ms"))


def _promise(row: Mapping[str, Any]) -> str:
    return f"{row['rule']} {row['predicted_ms']:.3g} ms"


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
        f"{row['measured_high_ms']:.3g} ms), {row['measured_ms'] / row['predicted_ms']:.2f} of the "
        "prediction"
        for name, row in own.items()
    ]
    return Finding("Measured on logical devices, which share the cores", said=(*said,))


def _dear(table: pd.DataFrame) -> list[str]:
    """The links on which list scheduling is predicted to be worse than all on one."""
    by = table.pivot_table(index="link", columns="rule", values="predicted_ms", sort=False)
    if not {LIST, ONE} <= {*by.columns}:
        return []
    return [str(link) for link in by.index[by[LIST] > by[ONE]]]


def _answer(own: Mapping[str, Mapping[str, Any]], dear: Sequence[str]) -> Finding:
    best = own[LIST]
    beaten = [name for name, row in own.items() if row["predicted_ms"] > best["predicted_ms"]]
    against = f"a shorter step than {' and '.join(beaten)}" if beaten else "no shorter step"
    head = f"A cost model of {len(own)} rules' plans promises **{LIST}** {against}"
    lost = (f"but a longer one than {ONE} with {' and '.join(dear)}",) if dear else ()
    if ONE not in own or best["measured_ms"] != best["measured_ms"]:
        return Finding(head, said=lost)
    if best["measured_high_ms"] < own[ONE]["measured_low_ms"]:
        kept = "measured steps are shorter than all on one, beyond their spread"
    elif best["measured_low_ms"] > own[ONE]["measured_high_ms"]:
        kept = "measured steps are longer than all on one, beyond their spread"
    else:
        kept = "measured steps and those of all on one do not differ beyond their spread"
    return Finding(head, said=(*lost, f"on the cores of this machine, {kept}"))


def _tower(name: str) -> str:
    return name.partition("/")[0]


def _first(error: str) -> str:
    """The first words of TensorFlow's error, up to where it names its own functions."""
    return error.partition(" [Op:")[0].partition(" used by")[0].rstrip(".")


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = table.to_dict("records")
    return found
