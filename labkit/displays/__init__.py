"""What objects look like in a notebook: HTML that is safe whatever their names say.

Each is one function of an object; classes call theirs from `_repr_html_`.
"""

from __future__ import annotations

from labkit.displays.cluster import cluster_html
from labkit.displays.experiment import brief, experiment_html
from labkit.displays.network import network_html
from labkit.displays.run import run_html
from labkit.displays.schedule import collective_html, pipeline_html, round_html

__all__ = [
    "brief",
    "cluster_html",
    "collective_html",
    "experiment_html",
    "network_html",
    "pipeline_html",
    "round_html",
    "run_html",
]
