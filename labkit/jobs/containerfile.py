"""The image in which Kubernetes runs labkit."""

from __future__ import annotations

import sys

from labkit import __version__

IMAGE = f"labkit:{__version__}"

# sshd, by which mpiexec starts ranks in other pods. Keys are mounted by the operator, with modes of
# its own; pods are new each time, so that nobody can know their keys beforehand.
_TEXT = """\
# An image of labkit {version}; in the folder of its source:
#     podman build -t {image} -f FILE .
# Written by `labkit container`, and not built there.
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
    """The Containerfile: this Python, this labkit, and what it needs."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return _TEXT.format(version=__version__, image=IMAGE, python=python)
