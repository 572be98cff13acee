"""What no strategy can do that trains parts of a model by steps of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.errors import InvalidInput
from labkit.strategies.base import Question

# What Keras does around its own training step, and not in an optimizer's update.
AROUND = ("use_ema", "loss_scale_factor")


def refuse_in_parts(experiment: Question) -> None:
    """Refuse what needs Keras's own training step, or all parts to skip one together."""
    if experiment.precision == "mixed_float16":
        raise InvalidInput(
            "precision='mixed_float16' needs a scaled loss, and all ranks to skip the same step; "
            "parts of a model do without: use precision='mixed_bfloat16' or 'float32'"
        )
    refuse_around(experiment.optimizer_options)


def refuse_around(options: Mapping[str, Any]) -> None:
    """Refuse an optimizer's options that Keras honours outside of its update."""
    for name in AROUND:
        if options.get(name):
            raise InvalidInput(
                f"{name}={options[name]} is what Keras does around its own training step, but "
                f"parts of a model take steps of their own; leave {name} out"
            )
