"""Shell scripts of a testbed: `agent` replaces ssh; `login` runs commands on the login node."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from labkit.hosts.host_namespaces import Binds, enter_command
from labkit.hosts.switch import DEVICE
from labkit.hosts.testbed_state import find_command

# Each letter in `VALUED` is an ssh option that takes a value.
VALUED = "BbcDEeFIiJLlmOopQRSWw"
# The environment variable PRTE_MCA_plm_ssh_agent names the command that mpiexec calls instead of
# ssh.
AGENT_VARIABLE = "PRTE_MCA_plm_ssh_agent"
# The environment variable LABKIT_TESTBED contains the folder of a testbed. labkit runs commands
# such as `srun` on the login node of the testbed. On the login node itself, the environment
# variable LABKIT_TESTBED is empty.
TESTBED = "LABKIT_TESTBED"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_AGENT = """#!/bin/sh
# Replaces ssh while the testbed is up: AGENT [OPTIONS] [USER@]HOST COMMAND...
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
# Run the command as sshd does: in a shell, in the home folder, with few variables.
exec {enter} env -i {variables} /bin/sh -c 'cd; eval "$1"' sh "$*"
"""


_LOGIN = """#!/bin/sh
# Runs a command on the login node: LOGIN COMMAND...
# The command sees this machine's files, and the testbed's host names only for itself.
{exports}
exec {unshare} --mount /bin/sh -c {mounts} sh "$@"
"""


def login(binds: Binds, agent: str, configuration: str | None) -> str:
    """Return the script that runs a command on the login node, which is this machine.

    Args:
        binds: Pairs (source path, path at which the source is mounted).
        agent: Path of the agent script, which replaces ssh unless the caller has set another agent.
        configuration: Path of slurm.conf; None if the testbed has no Slurm.
    """
    mount = shlex.quote(find_command("mount") or "mount")
    mounts = [f"{mount} --bind {shlex.quote(a)} {shlex.quote(b)}" for a, b in binds]
    exports = [
        f"export {TESTBED}=",
        # The script does not use `export NAME=${NAME:-…}`, because some shells split the value at
        # blanks.
        f'[ -n "${AGENT_VARIABLE}" ] || {AGENT_VARIABLE}={shlex.quote(agent)}',
        f"export {AGENT_VARIABLE}",
    ]
    if configuration is not None:
        exports.append(f"export SLURM_CONF={shlex.quote(configuration)}")
    return _LOGIN.format(
        exports="\n".join(exports),
        unshare=shlex.quote(find_command("unshare") or "unshare"),
        mounts=shlex.quote(" && ".join([*mounts, 'exec "$@"'])),
    )


def agent(hosts: Mapping[str, int], addresses: Mapping[str, str], runtime: str) -> str:
    """Return the script that replaces ssh on a testbed.

    Args:
        hosts: For each host name, the id of a process in the host's namespaces.
        addresses: IPv4 address of each host, by host name.
        runtime: Value of XDG_RUNTIME_DIR on all hosts.
    """
    cases = [f"    {name} | {addresses[name]}) pid={pid} ;;" for name, pid in hosts.items()]
    home = str(Path.home())
    variables = {"HOME": home, "USER": "root", "LOGNAME": "root", "SHELL": "/bin/sh", "PATH": PATH}
    variables["XDG_RUNTIME_DIR"] = runtime
    ip = shlex.quote(find_command("ip") or "ip")
    return _AGENT.format(
        valued=VALUED,
        cases="\n".join(cases),
        network=f"{_enter_words('--net')} {ip} -br link show {DEVICE}",
        enter=_enter_words(),
        variables=" ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items()),
    )


def _enter_words(*kinds: str) -> str:
    words = enter_command(0, kinds) if kinds else enter_command(0)
    return " ".join('"$pid"' if word == "0" else shlex.quote(word) for word in words)
