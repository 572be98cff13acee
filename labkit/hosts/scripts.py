"""Two commands of a testbed: `agent`, in place of ssh, and `login`, for the login node."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from labkit.hosts.host_init import Binds
from labkit.hosts.host_namespaces import entering
from labkit.hosts.requirements import found
from labkit.hosts.switch import DEVICE

# Letters of ssh's options that are followed by a value.
VALUED = "BbcDEeFIiJLlmOopQRSWw"
AGENT_VARIABLE = "PRTE_MCA_plm_ssh_agent"  # where mpiexec looks for it
# Names the folder of a testbed whose login node commands go through; empty on that node itself.
TESTBED = "LABKIT_TESTBED"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_AGENT = """#!/bin/sh
# In place of ssh, for as long as the testbed is up: AGENT [OPTIONS] [USER@]HOST COMMAND...
while [ $# -gt 0 ]; do
    case "$1" in
        -[{valued}]) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
[ $# -gt 1 ] || {{ echo "usage: $0 [OPTIONS] [USER@]HOST COMMAND..." >&2; exit 255; }}
host=${{1#*@}}
shift
case "$host" in
{cases}
    *) echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255 ;;
esac
{network} | grep -q LOWER_UP || {{
    echo "ssh: connect to host $host port 22: No route to host" >&2
    exit 255
}}
# As sshd does: nothing of the caller's environment, in the home folder, by a shell.
exec {enter} env -i {variables} /bin/sh -c 'cd; eval "$1"' sh "$*"
"""


_LOGIN = """#!/bin/sh
# A command on the login node: LOGIN COMMAND...
# It sees this machine's own files, but the testbed's names, which nobody else must see.
{exports}
exec {unshare} --mount /bin/sh -c {mounts} sh "$@"
"""


def login(binds: Binds, agent: str, configuration: str | None) -> str:
    """The text of the command that carries another one out on the login node, this machine.

    Args:
        binds: files and folders, and what each stands in the place of.
        agent: the command in place of ssh; another one that the caller has chosen stays.
        configuration: of the testbed's Slurm, if it has one.
    """
    mount = shlex.quote(found("mount") or "mount")
    mounts = [f"{mount} --bind {shlex.quote(a)} {shlex.quote(b)}" for a, b in binds]
    exports = [
        f"export {TESTBED}=",
        # Not `export NAME=${NAME:-…}`, which some shells split at blanks.
        f'[ -n "${AGENT_VARIABLE}" ] || {AGENT_VARIABLE}={shlex.quote(agent)}',
        f"export {AGENT_VARIABLE}",
    ]
    if configuration is not None:
        exports.append(f"export SLURM_CONF={shlex.quote(configuration)}")
    return _LOGIN.format(
        exports="\n".join(exports),
        unshare=shlex.quote(found("unshare") or "unshare"),
        mounts=shlex.quote(" && ".join([*mounts, 'exec "$@"'])),
    )


def agent(hosts: Mapping[str, int], addresses: Mapping[str, str], runtime: str) -> str:
    """The text of the command in place of ssh.

    Args:
        hosts: a process in the namespaces of each, by name.
        addresses: of each.
        runtime: XDG_RUNTIME_DIR of all of them.
    """
    cases = [f"    {name} | {addresses[name]}) pid={pid} ;;" for name, pid in hosts.items()]
    home = str(Path.home())
    variables = {"HOME": home, "USER": "root", "LOGNAME": "root", "SHELL": "/bin/sh", "PATH": PATH}
    variables["XDG_RUNTIME_DIR"] = runtime
    ip = shlex.quote(found("ip") or "ip")
    return _AGENT.format(
        valued=VALUED,
        cases="\n".join(cases),
        network=f"{_entering('--net')} {ip} -br link show {DEVICE}",
        enter=_entering(),
        variables=" ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items()),
    )


def _entering(*kinds: str) -> str:
    words = entering(0, kinds) if kinds else entering(0)
    return " ".join('"$pid"' if word == "0" else shlex.quote(word) for word in words)
