"""Test `labkit bench tf`: which kinds it compares and how it ends, with fake measurements."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
from click.testing import CliRunner, Result

from labkit.bench import frameworks
from labkit.cli.app import app
from labkit.common.errors import LabkitError
from labkit.strategies import TF_KINDS


def run(monkeypatch: pytest.MonkeyPatch, apart: float, *arguments: str) -> Result:
    """Run the command with fake ranks whose weights differ by `apart`; return its result."""

    def hold(*_: Any, **__: Any) -> list[frameworks.Comparison]:
        return [frameworks.Comparison([0.2, 0.1, 0.1], 8.0, apart, {})]

    ranks = nullcontext(type("Ranks", (), {"call": staticmethod(hold)}))
    monkeypatch.setattr(frameworks, "Cluster", lambda **_: ranks)
    # A real network link would need root and iproute2, which may be missing outside CI.
    monkeypatch.setattr("labkit.strategies.external_framework.require_tools", lambda: None)
    return CliRunner().invoke(app, ["bench", "tf", *arguments])


def test_over_a_network_the_kinds_of_one_process_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = run(monkeypatch, 0.0, "--network", "100Mb", "--cases", "mlp")
    assert result.exit_code == 0, result.output
    assert (
        "not measured: mirrored, central_storage, because strategies of one process"
        in result.output
    )
    kept = [line for line in result.output.splitlines() if line.startswith("mlp")]
    assert len(kept) == 4
    assert frameworks.kinds_on(None) == [*TF_KINDS]
    assert frameworks.kinds_on("100Mb") == ["multi_worker_mirrored", "parameter_server"]


@pytest.mark.parametrize("apart", [2e-12, math.nan])
def test_weights_that_are_apart_are_an_error(monkeypatch: pytest.MonkeyPatch, apart: float) -> None:
    result = run(monkeypatch, apart, "--kinds", "mirrored", "--cases", "mlp,rnn")
    assert result.exit_code != 0
    said = f"{result.output}{result.exception}"
    assert "NO" in said
    assert isinstance(result.exception, LabkitError | SystemExit)
    assert "mirrored on mlp sgd" in said
    assert "weights differ by more than 1e-12" in said


def test_twenty_steps_of_four_kinds_three_models_and_two_optimizers_are_held() -> None:
    asked = frameworks.experiments()
    assert len(asked) == 4 * 3 * 2
    assert {(each.steps_per_epoch, each.precision) for each in asked} == {(20, "float64")}
