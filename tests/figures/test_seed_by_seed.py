"""Two runs seed by seed: what is counted, and how often chance alone would do as well."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_compression import TOP_K, write_method

from labkit.common.errors import LabkitError
from labkit.figures import seed_by_seed, seed_reading
from labkit.records.run import Run

FED_BACK = {"name": "ErrorFeedback", "inner": TOP_K}


def written(root: Path, losses: list[float], compressor: dict[str, object]) -> Run:
    """A run whose seeds end with these test losses."""
    run = write_method(root, [0.9] * len(losses), compressor=compressor)
    for seed, loss in zip(run.seeds, losses, strict=True):
        file = seed.path / "metrics.json"
        file.write_text(file.read_text().replace('"test_loss": ', f'"test_loss": {loss}, "was": '))
    return run


def test_the_lower_test_loss_is_counted_by_seed(tmp_path: Path) -> None:
    with_feedback = written(tmp_path, [0.1, 0.2, 0.3, 0.4, 0.5], FED_BACK)
    without = written(tmp_path, [0.2, 0.3, 0.4, 0.5, 0.4], TOP_K)
    table = seed_by_seed(with_feedback, without)
    assert table["lower_test_loss"].tolist() == [True, True, True, True, False]
    assert table["baseline_test_loss"].tolist() == [0.2, 0.3, 0.4, 0.5, 0.4]
    said = seed_reading(with_feedback, without)
    assert "On digits, after 60 steps on 2 workers" in said
    assert (
        "ErrorFeedback(TopK(ratio=0.01)) ends with a lower test loss than TopK(ratio=0.01)" in said
    )
    assert "**4 of 5 seeds**: mean 0.3 against 0.36; chance alone" in said
    assert "so many or more in 19% of such trials" in said  # (5 + 1) / 32


def test_equal_losses_are_not_lower(tmp_path: Path) -> None:
    runs = [written(tmp_path, [0.2, 0.3], each) for each in (FED_BACK, TOP_K)]
    said = seed_reading(*runs)
    assert "training loss (mean of the last 20 steps)" in said
    assert said.count("**0 of 2 seeds**") == 2


def test_runs_of_other_seeds_are_refused(tmp_path: Path) -> None:
    one = write_method(tmp_path, compressor=TOP_K)
    other = write_method(tmp_path / "other", compressor=FED_BACK)
    file = other.path / "experiment.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 7'))
    with pytest.raises(LabkitError, match="share no completed seed"):
        seed_by_seed(Run(other.path), one)
