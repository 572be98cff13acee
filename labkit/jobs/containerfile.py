"""The container image in which Kubernetes runs labkit."""

from __future__ import annotations

import sys

from labkit import __version__

IMAGE = f"labkit:{__version__}"

# The image needs ssh, because mpiexec uses ssh to start ranks in other pods. The ssh option
# StrictModes is off, because the mpi-operator mounts the ssh keys with its own file modes. ssh does
# not check host keys, because each pod has new keys.
_TEXT = """\
# A container image of labkit {version}. Build it in the folder of the source:
#     podman build -t {image} -f FILE .
# Written by `labkit container`, which does not build it.
FROM python:{python}-slim
RUN apt-get update \\
 && apt-get install -y --no-install-recommends openssh-client openssh-server \\
 && rm -rf /var/lib/apt/lists/* \\
 && mkdir -p /run/sshd \\
 && echo 'StrictModes no' > /etc/ssh/sshd_config.d/labkit.conf \\
 && printf 'StrictHostKeyChecking no\\nUserKnownHostsFile /dev/null\\nLogLevel ERROR\\n' \\
    > /etc/ssh/ssh_config.d/labkit.conf
RUN pip install --no-cache-dir uv
WORKDIR /labkit
COPY pyproject.toml README.md ./
COPY labkit labkit
RUN uv sync --no-dev --no-editable
ENV PATH="/labkit/.venv/bin:$PATH"
WORKDIR /labkit/job
"""


def text() -> str:
    """Return a Containerfile with this Python version, this labkit version and its dependencies."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return _TEXT.format(version=__version__, image=IMAGE, python=python)
