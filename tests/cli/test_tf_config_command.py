"""Test a real TensorFlow cluster that uses the output of `labkit tf-config`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from labkit.cli.app import app
from labkit.frameworks.tf_config import free_ports

# The script follows TensorFlow's documentation, but each worker also starts a server.
OF_A_CLUSTER = """
import json, os
import tensorflow as tf

found = tf.distribute.cluster_resolver.TFConfigClusterResolver()
spec, job, index = found.cluster_spec(), found.task_type, found.task_id
if job == "worker":
    servers = [tf.distribute.Server(spec, each, index) for each in ("worker", "ps")]
    servers[0].join()
strategy = tf.distribute.ParameterServerStrategy(
    found, variable_partitioner=tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weights = tf.Variable(tf.zeros([4, 1]))

@tf.function
def step():
    x = tf.eye(4)
    with tf.GradientTape() as tape:
        whole = tf.concat(weights.variables, 0)
        loss = tf.reduce_sum((x @ whole - 1.0) ** 2)
    parts = weights.variables
    for part, gradient in zip(parts, tape.gradient(loss, parts)):
        part.assign_sub(0.25 * gradient)
    return loss

losses = [coordinator.schedule(step).fetch() for _ in range(3)]
print("devices", *sorted(part.device for part in weights.variables))
print("losses", *(float(each) for each in losses), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_what_is_printed_starts_a_cluster_with_servers_inside_of_workers() -> None:
    asked = ["--workers", "2", "--servers", "2", "--server-inside-worker"]
    port = str(free_ports(1)[0])
    printed = CliRunner().invoke(app, ["tf-config", "127.0.0.1", *asked, "--port", port])
    whose, lines = printed.stdout.splitlines()[::2], printed.stdout.splitlines()[1::2]
    assert [each.rpartition(": ")[2] for each in whose] == [
        *("chief 0", "worker 0 and ps 0", "worker 1 and ps 1"),
    ]
    kept = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "no_proxy": "127.0.0.1"}
    chief, *workers = (
        subprocess.Popen(
            ["sh", "-c", f'{line}; exec "$0" -c "$1"', sys.executable, OF_A_CLUSTER],
            env=kept,
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in lines
    )
    try:
        said, _ = chief.communicate(timeout=180)
    finally:
        for each in (chief, *workers):
            each.kill()
            each.communicate()
    devices, losses = said.splitlines()[-2:]
    assert [f"/job:ps/replica:0/task:{k}" in devices for k in range(2)] == [True, True]
    assert losses == "losses 4.0 1.0 0.25"
