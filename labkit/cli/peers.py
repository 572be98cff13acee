"""`labkit peers`: other frameworks to hold labkit against, and environments for them."""

from __future__ import annotations

import click

from labkit.common.terminal import say
from labkit.frameworks.environments import PEERS, SET_UP, find
from labkit.frameworks.environments import setup as set_up


@click.group()
def peers() -> None:
    """Other frameworks beside labkit: `lk.Peer(NAME)`, `labkit bench exchange --peer NAME`."""


@peers.command("list")
def list_peers() -> None:
    """Which are installed, and where; of others, how they are."""
    for name in PEERS:
        found = find(name)
        if isinstance(found, str):
            say(found)
        else:
            say(" ".join(filter(None, [f"{name}:", found.version, found.python])))


@peers.command()
@click.argument("name", type=click.Choice(SET_UP))
def setup(name: str) -> None:
    """Make an environment for NAME, from the package index, in the user's data folder.

    LABKIT_PEERS names another folder. PyTorch, which ddp and fsdp share, takes 5 GB, of which
    UV_TORCH_BACKEND=cpu leaves out what is for graphics cards; JAX takes 500 MB; Horovod is built,
    in some minutes, and wants cmake and a compiler.
    """
    found = set_up(name, say)
    say(f"{name}: {found.version} {found.python}")
    say(f'now it is there for lk.Peer("{name}") and labkit bench exchange --peer {name}')
