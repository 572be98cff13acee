"""Campaigns that test or time labkit itself, started by `python -m tests.acceptance NAME`."""

from __future__ import annotations

import os

from labkit.bench.command import CommandTable
from labkit.cli.app import OneLineErrors
from labkit.common.files import keep_bytecode
from tests.acceptance.repository import import_path


class _Campaigns(OneLineErrors, CommandTable):
    """The commands of this folder; they report errors in the same form as the command `labkit`."""


campaigns = _Campaigns(
    "tests.acceptance",
    {
        "attack": "tests.acceptance.attack",
        "faults": "tests.acceptance.faults.command",
        "forecasts": "tests.acceptance.forecasts.command",
        "fuzz": "tests.acceptance.fuzz",
        "hosts": "tests.acceptance.hosts.command",
        "matrix": "tests.acceptance.matrix",
        "mutants": "tests.acceptance.mutants",
        "records": "tests.acceptance.records",
        "report": "tests.acceptance.report",
        "simgrid": "tests.acceptance.simgrid_comparison",
        "weights": "tests.acceptance.weights",
    },
    "Run a campaign against labkit itself, or time it on thousands of runs.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the campaign that the command line names."""
    # All processes of a campaign inherit both environment variables: engines, notebook runs, and
    # ranks of mpiexec.
    keep_bytecode()
    os.environ["PYTHONPATH"] = import_path()
    campaigns(prog_name="python -m tests.acceptance")


if __name__ == "__main__":
    main()
