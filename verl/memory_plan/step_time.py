"""An estimate of the time of a step, from operations and bytes against the figures of a device.

It is an estimate: sequences have their maximum length, devices reach fixed fractions of their figures, and waiting for
rewards, stragglers and other processes is not in it. Compare settings with it; do not expect its seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl.memory_plan.accelerators import Device
from verl.memory_plan.device_memory import ENGINE_BYTES, EngineMemory, MemoryPlan, TrainMemory

COMPUTE_EFFICIENCY = 0.4  # share of a device's operations per second, in training and prefill
MEMORY_EFFICIENCY = 0.6  # share of a device's bandwidth, in decoding
LINK_EFFICIENCY = 0.7
ALL_REDUCE_SECONDS = 20e-6  # of a small one; on H100, 0.25 to 1 MB took vLLM 13 to 45 µs (sgl-project/sglang#2904)
HOST_SECONDS = 10e-6  # in which an engine schedules and returns one token of one sequence, while devices compute


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines that all have the same devices."""

    device: Device
    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def link(self) -> float:
        """Bytes per second and device of collectives over all ranks."""
        return self.get_link(self.ranks)

    def get_link(self, ranks: int) -> float:
        """Return the bytes per second and device of collectives over that many neighbors."""
        return LINK_EFFICIENCY * (self.device.link if ranks <= self.per_node else self.device.network)

    @property
    def host(self) -> float:
        """Bytes per second between a device and host memory."""
        return LINK_EFFICIENCY * self.device.host


@dataclass(frozen=True, slots=True)
class Workload:
    """The sequences of a step, at their maximum length."""

    sequences: int
    prompt: int
    response: int
    epochs: int = 1
    updates: int = 1  # optimizer steps per epoch

    @property
    def tokens(self) -> int:
        return self.sequences * (self.prompt + self.response)


def estimate_seconds(run: MemoryPlan, cluster: Cluster, load: Workload) -> dict[str, float]:
    """Return the seconds of each phase of a step. Saving is the copy to host memory, which the run waits for."""
    actor = run.models["actor"]
    seconds = {}
    if run.engine is not None:
        seconds["generation"] = _generation(run.engine, cluster, load)
    seconds["log-probs"] = sum(_pass(model, cluster, load, trains=False) for model in run.models.values())
    trained = [model for model in run.models.values() if model.update is not None]
    seconds["update"] = load.epochs * sum(_pass(model, cluster, load, trains=True) for model in trained)
    sent = ENGINE_BYTES * actor.shape.parameters
    seconds["weight sync"] = (sent + actor.copied_bytes(1, 0)) / cluster.host + sent / cluster.link
    seconds["save"] = actor.saved_bytes / cluster.host
    return seconds


def estimate_step(run: MemoryPlan, cluster: Cluster, load: Workload) -> float:
    """Return the seconds of a step after which nothing is saved."""
    return sum(value for phase, value in estimate_seconds(run, cluster, load).items() if phase != "save")


def suggest_split(seconds: dict[str, float], ranks: int, multiple: int) -> tuple[int, int] | None:
    """Return (rollout, training) devices with which both take equally long on disjoint devices.

    None if there are too few devices to split. Both are multiples of `multiple`.
    """
    if ranks < 2 * multiple:
        return None
    training = seconds["log-probs"] + seconds["update"]
    share = seconds.get("generation", 0.0) / (seconds.get("generation", 0.0) + training)
    rollout = round(share * ranks / multiple) * multiple
    rollout = min(max(rollout, multiple), ranks - multiple)
    return rollout, ranks - rollout


def _pass(model: TrainMemory, cluster: Cluster, load: Workload, *, trains: bool) -> float:
    """Return the seconds of all micro-batches.

    Computing, and what ranks that share sequences or matrices exchange in every layer; or the exchange of weights and
    gradients, if that takes longer; and copies of what is offloaded.
    """
    shape, size = model.shape, model.update if trains and model.update is not None else model.forward
    context = (load.prompt + load.response) / 2  # a token attends to half of its sequence on average
    operations = shape.count_operations(context)
    backward = 3 if model.settings.gradient_checkpointing else 2  # times the operations of a forward pass
    factor = 1 + backward if trains else 1
    tokens = load.tokens / cluster.ranks
    computing = factor * operations * tokens / (COMPUTE_EFFICIENCY * cluster.device.flops)
    exchanges = backward if trains else 1  # passes through all layers: forward, perhaps once more, and backward
    per_token = sum(sent / cluster.get_link(neighbors) for neighbors, sent in model.exchanges())
    exchanging = exchanges * tokens * per_token
    passes = max(1.0, tokens / max(1, size.tokens))
    waiting = model.waiting if trains else 1.0
    copying = model.copied_bytes(passes, load.updates if trains else 0) / cluster.host
    gathering = passes * model.exchanged_bytes(trains=trains) / cluster.link
    return max(waiting * (computing + exchanging), gathering) + copying


def _generation(engine: EngineMemory, cluster: Cluster, load: Workload) -> float:
    """Return the seconds to generate all responses: prefill by operations, decoding by bytes read per token."""
    device, shape = cluster.device, engine.shape
    engines = max(1, cluster.ranks // engine.width)
    own = load.sequences / engines
    fitting = engine.cache(device.memory) // max(1, engine.tokens * engine.token_bytes)
    at_once = max(1.0, min(own, engine.sequences or device.vllm_sequences, fitting))
    prefill = 2 * shape.active_parameters * own * load.prompt / (COMPUTE_EFFICIENCY * device.flops * engine.width)
    context = load.prompt + load.response / 2
    is_sparse = shape.experts and at_once * shape.experts_per_token < shape.experts
    read = ENGINE_BYTES * shape.active_parameters * at_once / engine.width if is_sparse else engine.weights
    per_token = (min(read, engine.weights) + at_once * context * engine.token_bytes) / (
        MEMORY_EFFICIENCY * device.bandwidth
    )
    computing = 2 * shape.active_parameters * at_once / (COMPUTE_EFFICIENCY * device.flops * engine.width)
    per_step = max(per_token, computing, HOST_SECONDS * at_once) + _all_reduces(engine, cluster, at_once)
    prefill += _all_reduces(engine, cluster, own * load.prompt)
    return prefill + per_step * load.response * max(1.0, own / at_once)


def _all_reduces(engine: EngineMemory, cluster: Cluster, tokens: float) -> float:
    """Return the seconds in which the devices of an engine add up hidden states, twice per layer."""
    if engine.width == 1:
        return 0.0
    sent = 2 * ENGINE_BYTES * tokens * engine.shape.width * (engine.width - 1) / engine.width
    return 2 * engine.shape.layers * (ALL_REDUCE_SECONDS + sent / cluster.get_link(engine.width))
