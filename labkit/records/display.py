"""A run: how it ended, what the gate says, its key figures and its curve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from labkit.common.html import card, curve, folded, pairs, preformatted

if TYPE_CHECKING:
    from labkit.records.run import Run


def run_html(run: Run, facts: Mapping[str, str]) -> str:
    """State and facts (verdict, key figures); the loss after each epoch; folded: parameters."""
    status = run.status
    cause = f" · {status['cause']}" if status.get("cause") else ""
    rows = {"state": f"{status['state']}{cause}", **facts}
    parameters = json.dumps(run.experiment, indent=1, ensure_ascii=False)
    return card(
        run.name,
        pairs(rows),
        _losses(run.metrics.get("epochs") or []),
        folded("parameters", preformatted(parameters)),
    )


def _losses(epochs: list[dict[str, Any]]) -> str:
    """The curve of the held-out loss, or of the training's where nothing was held out."""
    for name, words in (("val_loss", "held-out loss"), ("loss", "loss")):
        values = [epoch[name] for epoch in epochs if epoch.get(name) is not None]
        if len(values) > 1:
            said = (
                f"{words} after each of {len(values)} epochs: {values[0]:.4g} to {values[-1]:.4g}"
            )
            return curve(values, said)
    return ""
