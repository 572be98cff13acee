"""Test that the checker finds sentences whose conclusion contradicts their own numbers."""

from __future__ import annotations

import pytest

from labkit.jobs.gallery.check import RULES, contradictions

# Each entry has a true sentence of a gallery notebook, and a replacement that makes it false.
PLANTED = [
    (
        "- On 4 workers: **1 server**, 3,263 samples/s (2 seeds, 3,195 to 3,332); throughput "
        "grows with each doubling of the workers up to 4.",
        ("3,263", "3,363"),
    ),
    (
        "- **w 2** against w 1: 0.49x the samples per second (spread 0.27 to 0.63); efficiency "
        "24%: "
        "it does not pay.",
        ("0.49x", "0.69x"),
    ),
    ("- **a** against b: 1.40x the speed (spread 1.20 to 1.60): it pays.", ("1.20", "0.90")),
    (
        "- **a** against b: 0.80x the speed (spread 0.70 to 0.90): it does not pay.",
        ("0.90", "1.30"),
    ),
    (
        "- **a** against b: 0.96x the speed (spread 0.68 to 1.31): no difference beyond the spread "
        "of the steps.",
        ("0.68", "1.10"),
    ),
    (
        "- **int8**: 0.90x the original's inference time (repeats 0.85 to 0.95): faster.",
        ("faster", "slower"),
    ),
    (
        "- **int8**: 1.20x the original's inference time (repeats 1.15 to 1.25): slower.",
        ("slower", "faster"),
    ),
    ("- No speed-up in 3 of 6 comparisons.", ("3 of 6", "7 of 6")),
    ("- **ring**: 59.4 ms, 1.91 times the fastest.", ("1.91", "0.91")),
    (
        "- The shortest step of these runs is that of **overlap** (9.5 ms), the longest step is "
        "that of **sequential** (0.012 s).",
        ("9.5 ms", "95 ms"),
    ),
    (
        "- wall clock: the shortest step is that of **a, 1GbE**, 773 µs (p10 to p90 700 µs to "
        "1.2 ms), the next 19.5 ms; 1.25x the speed of b.",
        ("the next 19.5 ms", "the next 19.5 µs"),
    ),
    (
        "- The residual still grows: its mean norm is 1.39 in the last quarter of the steps, 1.13 "
        "in the quarter before.",
        ("1.39", "1.09"),
    ),
    (
        "- **More servers give a higher throughput** (4 workers): reproduced: 2 servers serve 900 "
        "samples/s, 1 server serve 600: 1.50 ×.",
        ("reproduced", "**not** reproduced"),
    ),
    (
        "- **More servers give a higher throughput** (4 workers): **not** reproduced: 2 servers "
        "serve 500 samples/s, 1 server serve 600: 0.83 ×.",
        ("**not** reproduced", "reproduced"),
    ),
    (
        "- **A backup worker shortens the step** (Chen 2016), 4 workers: reproduced: with "
        "backup_workers=1 a step takes 30 ms, without 60 ms: 0.50 ×; effective samples/s 3 against "
        "2.",
        ("reproduced", "**not** reproduced"),
    ),
    (
        "- **A backup worker shortens the step** (Chen 2016), 4 workers: **not** reproduced: with "
        "backup_workers=1 a step takes 60 ms, without 30 ms: 2.00 ×; effective samples/s 3 against "
        "2.",
        ("**not** reproduced", "reproduced"),
    ),
    (
        "- **AllReduce**: the rank with the most memory keeps 71.7 MiB, a step takes 215 ms.\n"
        "- **Pipeline**: the rank with the most memory keeps 900 KiB, a step takes 1.2 s.\n"
        "- Least memory on a rank: **Pipeline**; shortest step: **AllReduce**.",
        ("shortest step: **AllReduce**", "shortest step: **Pipeline**"),
    ),
    ("- **a**: speed-up 1.16, at most 1.33 by theory.", ("1.16", "nan")),
]


@pytest.mark.parametrize(("true", "planted"), PLANTED)
def test_a_true_sentence_stands_and_a_false_one_is_found(
    true: str, planted: tuple[str, str]
) -> None:
    assert list(contradictions(true)) == []
    false = true.replace(*planted)
    assert false != true
    assert list(contradictions(false)), false


def test_no_law_is_without_a_sentence_that_it_holds() -> None:
    text = "\n".join(true for true, _ in PLANTED)
    assert [rule.words for rule in RULES if not rule.form.search(text)] == []
