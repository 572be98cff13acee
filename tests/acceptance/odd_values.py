"""Values that no file should contain, and a notebook in which the campaigns insert them."""

from __future__ import annotations

from typing import Any

NOTEBOOK: dict[str, Any] = {
    "cells": [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# Does it pay?"]},
        {
            "cell_type": "code",
            "id": "b",
            "metadata": {"tags": ["parameters"]},
            "execution_count": None,
            "outputs": [],
            "source": [
                "workers: int = 2  # ranks\n",
                "learning_rate: float = 0.1  # of one worker\n",
                'strategy: list[str | dict] = ["AllReduce"]  # what is compared\n',
                "widths: dict[str, list[int]] = {}  # of layers\n",
                'input_mode: Literal["shard", "scatter"] = "shard"  # who reads\n',
            ],
        },
        {
            "cell_type": "code",
            "id": "c",
            "metadata": {},
            "execution_count": 1,
            "source": "figure",
            "outputs": [
                {
                    "output_type": "display_data",
                    "metadata": {},
                    "data": {
                        "application/vnd.plotly.v1+json": {
                            "data": [{"type": "scatter", "y": [1, 2.5, 2]}],
                            "layout": {"title": {"text": "Loss"}, "height": 300},
                        },
                        "text/plain": ["a figure"],
                    },
                },
                {"output_type": "stream", "name": "stdout", "text": ["epoch 1\n"]},
            ],
        },
    ],
    "metadata": {"kernelspec": {"display_name": "Python 3", "name": "python3"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}
NASTY: list[Any] = [
    *(None, True, -1, 0, 1.5, 1e26, 10**30, float("inf"), float("nan"), "", "None", "inf"),
    *("../../x", "/etc/passwd", "=1+1", "\x1b]0;title\x07", "\u202egnp", "<script>x</script>"),
    *("a" * 3000, "é" * 300, "!!python/object:os.system", "&a [*a]", "{a: ", "[[[[", "a: b: c"),
    *([], {}, [[]], {"": []}, [1, "a", None], {"name": "Pipelin"}, ["NaN"], "1e26", "Pipelin"),
    *({"name": "AllReduce", "compressor": {"name": "TopK", "ratio": 9}}, "range(1,3)", "1,2,,"),
]
