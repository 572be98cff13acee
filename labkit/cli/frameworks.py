"""`labkit frameworks`: Python environments of other frameworks, for comparisons with labkit."""

from __future__ import annotations

import click

from labkit.common.terminal import say
from labkit.frameworks.environments import PEERS, SET_UP, find
from labkit.frameworks.environments import setup as set_up


@click.group()
def frameworks() -> None:
    """Set up other frameworks for comparisons with labkit.

    Use a framework as lk.ExternalFramework(NAME), or by labkit bench exchange --peer NAME.
    """


@frameworks.command("list")
def list_peers() -> None:
    """List the frameworks: version and Python, or how to install a missing framework."""
    for name in PEERS:
        found = find(name)
        if isinstance(found, str):
            say(found)
        else:
            say(" ".join(filter(None, [f"{name}:", found.version, found.python])))


@frameworks.command()
@click.argument("name", type=click.Choice(SET_UP))
def setup(name: str) -> None:
    """Install a framework into a separate Python environment.

    The packages come from the Python package index. The environment is created in the user's data
    folder, or in the folder that LABKIT_PEERS names. ddp and fsdp share PyTorch, which takes 5 GB;
    UV_TORCH_BACKEND=cpu omits its GPU packages. JAX takes 500 MB. Horovod is compiled in some
    minutes and requires cmake and a compiler.
    """
    found = set_up(name, say)
    say(f"{name}: {found.version} {found.python}")
    say(f'to use {name}: lk.ExternalFramework("{name}"), or labkit bench exchange --peer {name}')
