"""`labkit frameworks`: separate Python environments of other frameworks, for comparisons."""

from __future__ import annotations

import click

from labkit.common.terminal import say
from labkit.frameworks.environments import PEERS, SET_UP, find
from labkit.frameworks.environments import setup as set_up


@click.group()
def frameworks() -> None:
    """Install other frameworks for comparisons with labkit.

    Use a framework in a notebook as lk.ExternalFramework(NAME), or on the command line by labkit
    bench exchange --peer NAME.
    """


@frameworks.command("list")
def list_peers() -> None:
    """List each framework with its version and Python, or with the way to install it."""
    for name in PEERS:
        found = find(name)
        if isinstance(found, str):
            say(found)
        else:
            say(" ".join(filter(None, [f"{name}:", found.version, found.python])))


@frameworks.command()
@click.argument("name", type=click.Choice(SET_UP))
def setup(name: str) -> None:
    """Install a framework into a separate Python environment of its own.

    The packages come from the Python package index. The environment is created in the user's data
    folder, or in the folder that the variable LABKIT_PEERS names. The frameworks ddp and fsdp share
    one installation of PyTorch, which needs 5 GB of disk; UV_TORCH_BACKEND=cpu omits its GPU
    packages. The environment with JAX needs 500 MB of disk. Horovod is compiled, which takes some
    minutes and requires cmake and a compiler.
    """
    found = set_up(name, say)
    say(f"{name}: {found.version} {found.python}")
    say(f'to use {name}: lk.ExternalFramework("{name}"), or labkit bench exchange --peer {name}')
