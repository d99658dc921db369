"""What is concluded from the reports of a cluster's nodes."""

from __future__ import annotations

import pytest

from verl.cluster.nodes import NodeReport
from verl.config.load import load_dict
from verl.config.schema import Config
from verl.preflight.cluster import find_node_findings

pytestmark = pytest.mark.unit

HERE = {"verl": "0.1.0 (commit abc)", "python": "3.11.7 (/usr/bin/python)", "torch": "2.13.0", "ray": "2.60.0"}


def make_config(*settings: str) -> Config:
    given = ["trainer.nnodes=2", "trainer.n_gpus_per_node=8", "data.train_batch_size=64", *settings]
    return load_dict({}, given, complete=False).config


def test_a_cluster_with_the_same_versions_and_enough_devices_has_no_findings() -> None:
    same = {**HERE, "verl": "0.1.0", "python": "3.11.7 (/opt/python)"}
    nodes = [NodeReport("a", 8, 64, HERE), NodeReport("b", 8, 64, same)]
    assert list(find_node_findings(make_config(), nodes, HERE)) == []


def test_other_versions_and_nodes_that_do_not_respond_are_named() -> None:
    old = NodeReport("b", 8, 64, {**HERE, "torch": "2.12.0", "ray": "2.59.0"})
    nodes = [NodeReport("a", 8, 64, HERE), old, NodeReport("c", 8, 64, None, "does not respond within 30 s")]
    other, silent = find_node_findings(make_config(), nodes, HERE)
    assert other.place == "cluster, node b"
    assert other.problem == "other versions: torch 2.12.0 (here 2.13.0); ray 2.59.0 (here 2.60.0)"
    assert silent.place == "cluster, node c"


def test_too_few_devices_are_an_error() -> None:
    nodes = [NodeReport("a", 8, 64, HERE), NodeReport("b", 4, 64, HERE)]
    [finding] = find_node_findings(make_config(), nodes, HERE)
    assert finding.problem == "the run needs 16 GPUs, and the cluster has 12"
    assert not list(find_node_findings(make_config("trainer.device=cpu"), nodes, HERE))
