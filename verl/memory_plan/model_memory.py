"""A closed-form estimate of the memory that a rank needs to train a model, by phase and content. Imports no torch.

Its terms are the tensors that are alive at the peaks of `FsdpEngine`, found by `tests/memory_measure.py`, against which
`make show-budget` checks it. Where a phase has several peaks, the estimate is the highest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from verl.models.model_shape import ModelShape
from verl.training.fsdp.settings import FsdpSettings
from verl.training.settings import default_chunk

PHASES = ("load", "log-probs", "update", "weight sync", "probe", "save")
SYNC_BYTES = 2  # per weight that is sent to an engine
PROBE_TOKENS = 256  # of the sequences that are compared after a weight sync


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes by content. `buffers` are gathered weights and the buffers of collectives."""

    weights: int = 0
    gradients: int = 0
    moments: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    engine_weights: int = 0
    kv_cache: int = 0
    reserved: int = 0  # by driver, communication library and allocator

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def items(self) -> Iterator[tuple[str, int]]:
        """Yield (content, bytes)."""
        yield from ((field.name.replace("_", " "), getattr(self, field.name)) for field in fields(self))


@dataclass(frozen=True, slots=True)
class PassSize:
    """The largest micro-batch of a pass: its tokens, and how many of them are trained or need log-probs."""

    tokens: int
    trained: int


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The memory of one model, sharded over `ranks`, on one of them.

    Args:
        update: The largest micro-batch of an update, None for a model that is not trained.
        forward: The largest micro-batch of a pass without gradients.
        micro_batches: Micro-batches of an update; from the second on, gradients of the first are held.
    """

    shape: ModelShape
    settings: FsdpSettings
    ranks: int
    forward: PassSize
    update: PassSize | None = None
    micro_batches: int = 2

    def at_rest(self, *, with_moments: bool = True) -> Usage:
        """Return what stays on the device while the model is idle."""
        settings = self.settings
        weights = 0 if settings.param_offload or settings.offload_policy else self._weights
        is_held = with_moments and not (settings.optimizer_offload or settings.offload_policy)
        return Usage(weights=weights, moments=self._moments if is_held else 0)

    def peaks(self) -> dict[str, Usage]:
        """Return the highest usage of each phase; a model that is not trained has no update and is not saved."""
        phases = {"load": self.at_load(), "log-probs": self.in_logprobs()}
        if self.update is not None:
            phases |= {"update": self.in_update(), "weight sync": self.in_weight_sync()}
            phases |= {"probe": self.in_probe(), "save": self.in_save()}
        return phases

    def at_load(self) -> Usage:
        """Return the usage once the weights are read, before any of them are offloaded."""
        return Usage(weights=0 if self.settings.offload_policy else self._weights)

    def in_logprobs(self) -> Usage:
        """Return the usage of a pass without gradients."""
        return self._forward_pass(self.forward)

    def in_probe(self) -> Usage:
        """Return the usage of the pass that follows a weight sync, while engines on the same device are awake."""
        return self._forward_pass(PassSize(PROBE_TOKENS, PROBE_TOKENS))

    def _forward_pass(self, size: PassSize) -> Usage:
        """Return the usage of a pass without gradients: before or in a layer, or of the last layer's logits."""
        b, shape = self._compute, self.shape
        root = b * shape.root_parameters
        gathered = 2 * b * self._gathered_layer  # the buffer of the collective, and the weights copied from it
        hidden = b * size.tokens * shape.width
        start = Usage(activations=hidden, buffers=2 * root + gathered)  # FSDP keeps the buffer of the collective before
        between = Usage(activations=hidden, buffers=root + 3 * gathered // 2 + self._left_gathered)
        layer = Usage(
            activations=size.tokens * self.shape.forward_token_bytes(self._compute),
            buffers=root + gathered + self._left_gathered,
        )
        head = Usage(
            activations=b * shape.width * (2 * size.tokens + size.trained),
            logits=2 * self._chunk_bytes(size),
            buffers=root + self._left_gathered,
        )
        return self._in_use() + highest(start, between, layer, head)

    def in_update(self) -> Usage:
        """Return the usage of an update: in the backward pass of head, layers or embeddings, or in the step.

        The pass before a save, which shows whether the model has diverged, is one of few tokens and needs no more.
        """
        assert self.update is not None
        trained = self._trained_parameters
        earlier = trained if self.micro_batches > 1 else 0
        held = self._in_use(gradients=earlier)
        return highest(
            held + self._head_backward(self.update),
            held + self._layer_backward(self.update),
            self._in_use(gradients=earlier or max(0, trained - self.shape.root_parameters)) + self._root_backward(),
            self._in_use(gradients=trained, with_moments=True),
        )

    def _head_backward(self, size: PassSize) -> Usage:
        """Return the usage while log-probs are differentiated, chunk by chunk.

        Each chunk adds its gradient of the weight, in the type of the computation, to a sum in float32.
        """
        b, shape, chunk = self._compute, self.shape, self._chunk_bytes(size)
        part = self._head_gradient if b < 4 else 0
        total = 4 * self._head_gradient // b
        kept, _ = self._kept_activations(size)
        return Usage(
            activations=kept + b * shape.width * (size.tokens + 3 * size.trained),
            logits=total + max(2 * chunk, chunk // 2 + part),
            buffers=b * shape.root_parameters + self._left_gathered,
        )

    def _layer_backward(self, size: PassSize) -> Usage:
        """Return the usage of a layer near the end of the model.

        It is gathered, the one before it is being gathered, and gradients of the one after it, which have no padding
        yet, are being reduced.
        """
        b, shape = self._compute, self.shape
        _, inputs = self._kept_activations(size)
        return Usage(
            activations=inputs + size.tokens * self.shape.backward_token_bytes(self._compute),
            buffers=b * (shape.root_parameters + 2 * self._gathered_layer + self._whole_layer)
            + self._head_gradient
            + self._reduced_layer
            + self._left_gathered,
        )

    def _root_backward(self) -> Usage:
        """Return the usage while the gradients of embeddings and head are reduced, in float32, at the very end."""
        if self.settings.lora is not None:
            return Usage()
        return Usage(buffers=(self._compute + 4) * self.shape.root_parameters)

    def in_weight_sync(self) -> Usage:
        """Return the usage while the weights are gathered one by one, each with the buffer of its all-gather."""
        shape = self.shape
        rows = self.ranks * -(-shape.experts // self.ranks) if shape.experts else 1  # with padding
        largest = max(shape.vocabulary * shape.width, rows * 2 * shape.width * shape.mlp)
        return self._in_use() + Usage(buffers=2 * SYNC_BYTES * largest + SYNC_BYTES * largest // self.ranks)

    def in_save(self) -> Usage:
        """Return the usage while the state is copied to host memory: what is offloaded, one tensor at a time."""
        settings, shape = self.settings, self.shape
        offloads = settings.param_offload or settings.optimizer_offload
        largest = shape.vocabulary * shape.width // self.ranks if offloads and not settings.offload_policy else 0
        return self.at_rest() + Usage(buffers=itemsize(settings.param_dtype) * largest)

    @property
    def _compute(self) -> int:
        return itemsize(self.settings.compute_dtype)

    def exchanged_bytes(self, *, trains: bool) -> int:
        """Return the bytes that a micro-batch sends over the network: gathered weights, and gradients."""
        gathers = 2 if trains and self.settings.reshard_after_forward else 1
        return gathers * self._compute * self.shape.parameters + (4 * self.shape.parameters if trains else 0)

    def exchanges(self) -> Iterator[tuple[int, float]]:
        """Yield (neighbors, bytes per token that a rank sends to them in a forward pass): heads, around attention."""
        ranks, shape = self.settings.sequence_parallel_size, self.shape
        kv_width = shape.kv_width * count_repeats(shape.kv_heads, ranks)
        yield ranks, self._compute * shape.layers * 2 * (shape.attention_width + kv_width) * (ranks - 1) / ranks

    def copied_bytes(self, micro_batches: float, updates: int) -> float:
        """Return the bytes between device and host memory, for a pass of so many micro-batches and their updates.

        With `offload_policy` every pass of a layer copies its weights, and the optimizer passes about ten times over
        weights and moments in host memory.
        """
        settings, weights, moments = self.settings, self._weights, self._moments
        if settings.offload_policy:
            return micro_batches * weights * (3 if updates else 1) + updates * 10 * (weights + moments)
        return 2 * (max(1, updates) * weights * settings.param_offload + updates * moments * settings.optimizer_offload)

    @property
    def waiting(self) -> float:
        """How much longer an update takes because ranks wait for each other."""
        return 1.0

    @property
    def saved_bytes(self) -> int:
        """The bytes of a rank's part of a checkpoint."""
        return self._weights + self._moments

    @property
    def _weights(self) -> int:
        return itemsize(self.settings.param_dtype) * self.shape.count_largest_shard(self.ranks)

    def _shard(self, trained: float) -> int:
        """Return the part of the trained parameters that is on the rank with the most of them."""
        if self.settings.lora is not None:
            return int(trained / self.ranks)
        return int(trained * self.shape.count_largest_shard(self.ranks) / self.shape.parameters)

    @property
    def _trained_parameters(self) -> int:
        if not self.settings.trainable:
            return 0
        lora = self.settings.lora
        return self.shape.parameters if lora is None else self._adapter_parameters(lora.rank)

    def _adapter_parameters(self, rank: int) -> int:
        """Return the parameters of an adapter on all linear modules; experts have none."""
        shape = self.shape
        sides = 2 * (shape.width + shape.attention_width) + 2 * (shape.width + shape.kv_width)
        sides += 0 if shape.experts else 3 * (shape.width + shape.mlp)
        return rank * sides * shape.layers

    @property
    def _moments(self) -> int:
        """AdamW has two numbers per parameter; Muon one for the matrices of layers."""
        size = 4 if self.settings.stochastic_rounding else itemsize(self.settings.param_dtype)
        trained, shape = self._trained_parameters, self.shape
        total = {
            "adamw": 2 * size * trained,
            "adamw_8bit": 2.05 * trained,
            "muon": size * (trained + min(trained, shape.root_parameters)),
        }[self.settings.optimizer]
        return self._shard(total)

    def _in_use(self, *, gradients: int = 0, with_moments: bool = False) -> Usage:
        """Return what is on the device while the model computes, with the gradients of that many parameters."""
        settings = self.settings
        if settings.offload_policy:
            return Usage()
        return Usage(
            weights=self._weights,
            gradients=itemsize(settings.param_dtype) * self._shard(gradients),
            moments=self._moments if with_moments or not settings.optimizer_offload else 0,
        )

    @property
    def _head_gradient(self) -> int:
        """The gradient of the vocabulary projection, before it is reduced."""
        if self.settings.lora is not None or self.shape.has_value_head:
            return 0
        return self._compute * self.shape.vocabulary * self.shape.width

    @property
    def _gathered_layer(self) -> int:
        """The parameters of a gathered layer, with padding."""
        if self.settings.expert_parallel_size > 1:
            return self._whole_layer
        return self.shape.padded_parameters(self.ranks)

    @property
    def _whole_layer(self) -> int:
        return self.shape.gathered_parameters(self.settings.expert_parallel_size)

    @property
    def _reduced_layer(self) -> int:
        """The buffer in which a layer's gradients are reduced, in float32."""
        return 4 * self._gathered_layer if self.settings.lora is None else 0

    @property
    def _left_gathered(self) -> int:
        """Weights of the other layers that stay gathered until the backward pass."""
        if self.settings.reshard_after_forward:
            return 0
        return self._compute * self._gathered_layer * (self.shape.layers - 1)

    def _chunk_bytes(self, size: PassSize) -> int:
        """Return the bytes of one chunk of logits in float32."""
        if self.shape.has_value_head:
            return 0
        chunk = self.settings.logprob_chunk or default_chunk(self.settings.device, self.shape.vocabulary)
        return 4 * min(chunk, size.trained) * self.shape.vocabulary

    def _kept_activations(self, size: PassSize) -> tuple[int, int]:
        """Return what the forward pass keeps, and how much of it remains for the layers before the last one."""
        shape = self.shape
        if self.settings.gradient_checkpointing:
            inputs = self._compute * size.tokens * shape.width * shape.layers
            return inputs, inputs
        saved = size.tokens * self.shape.saved_token_bytes(self._compute)
        return saved * shape.layers, saved * (shape.layers - 1)


def highest(*usages: Usage) -> Usage:
    """Return the usage with the largest total."""
    return max(usages, key=lambda usage: usage.total)


def count_repeats(kv_heads: int, ranks: int) -> int:
    """Return how often ranks that share sequences repeat heads of keys and values, so that each can have its part."""
    return math.lcm(kv_heads, ranks) // kv_heads


def itemsize(dtype: str) -> int:
    """Return the bytes of a number."""
    return 4 if dtype == "float32" else 2
