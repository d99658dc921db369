"""A closed-form estimate of the memory of a rank that trains with Megatron-Core, by phase and content.

All terms follow from the code of the engine. Weights, gradients and optimizer state are compared with those of ranks;
the other terms have not been compared with a measurement yet. Every expert is assumed to get as many tokens as any
other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.memory_plan.model_memory import (
    PROBE_TOKENS,
    SYNC_BYTES,
    PassSize,
    Usage,
    count_repeats,
    highest,
    itemsize,
)
from verl.models.model_shape import ModelShape
from verl.training.megatron.settings import MegatronSettings
from verl.training.settings import default_chunk

CHUNKS = 4  # float32 copies of a chunk of logits that exist at once
GATHERED = 3  # hidden states of all tokens in the backward pass of a layer: gathered inputs, and their gradients


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage. `in_flight` are its micro-batches whose backward pass is still to come."""

    layers: int
    has_embeddings: bool
    has_head: bool
    in_flight: int


@dataclass(frozen=True, slots=True)
class MegatronMemory:
    """The memory of one model on `ranks` ranks, on the rank that needs most in each phase.

    Args:
        update: The largest micro-batch of an update, None for a model that is not trained.
        forward: The largest micro-batch of a pass without gradients.
        micro_batches: Micro-batches of an update.
    """

    shape: ModelShape
    settings: MegatronSettings
    ranks: int
    forward: PassSize
    update: PassSize | None = None
    micro_batches: int = 2

    def stages(self) -> Iterator[Stage]:
        """Yield the stages; those in the middle are alike."""
        settings, count = self.settings, self.settings.pipeline_parallel_size
        given = [each for each in (settings.first_stage_layers, settings.last_stage_layers) if each is not None]
        others = (self.shape.layers - sum(given)) // max(1, count - len(given))
        for index in range(count):
            is_first, is_last = index == 0, index == count - 1
            own = settings.first_stage_layers if is_first else settings.last_stage_layers if is_last else None
            in_flight = min(count - index, self.micro_batches)
            yield Stage(others if own is None else own, is_first, is_last, in_flight)

    def count_parameters(self, stage: Stage) -> tuple[int, int]:
        """Return the parameters of a rank of this stage: (dense ones, experts)."""
        shape, tensor = self.shape, self.settings.tensor_parallel_size
        projections = shape.width * (2 * shape.attention_width + 2 * shape.kv_width) // tensor
        mlp = shape.experts * shape.width if shape.experts else 3 * shape.width * shape.mlp // tensor  # the router
        vocabulary = -(-shape.vocabulary // tensor) * shape.width
        has_own_head = stage.has_head and not shape.has_value_head and not (shape.is_tied and stage.has_embeddings)
        root = vocabulary * (stage.has_embeddings + has_own_head) + (shape.width if stage.has_head else 0)
        root += shape.width if stage.has_head and shape.has_value_head else 0
        experts = shape.experts // self.settings.expert_parallel_size * 3 * shape.width * shape.mlp
        return stage.layers * (projections + mlp + 2 * shape.width) + root, stage.layers * experts

    def peaks(self) -> dict[str, Usage]:
        """Return the highest usage of each phase; a model that is not trained has no update and is not saved."""
        phases = {"load": self.at_load(), "log-probs": self.in_logprobs()}
        if self.update is not None:
            phases |= {"update": self.in_update(), "weight sync": self.in_weight_sync()}
            phases |= {"probe": self.in_probe(), "save": self.in_save()}
        return phases

    def at_rest(self, *, with_moments: bool = True) -> Usage:
        """Return what stays on the device while the model is idle."""
        settings = self.settings
        return highest(
            *(
                Usage(
                    weights=0 if settings.param_offload else self._weights(stage),
                    gradients=0 if settings.grad_offload else self._gradients(stage),
                    moments=0 if settings.optimizer_offload else self._optimizer(stage, has_stepped=with_moments),
                )
                for stage in self.stages()
            )
        )

    def at_load(self) -> Usage:
        """Return the usage while weights are copied into the optimizer's buffers, or once its own weights exist."""
        usages = []
        for stage in self.stages():
            weights, own = self._weights(stage), self._optimizer(stage, has_stepped=False)
            copied = Usage(buffers=weights if self.settings.trainable else 0)
            usages += [Usage(weights, self._gradients(stage)) + each for each in (copied, Usage(moments=own))]
        return highest(*usages)

    def in_logprobs(self) -> Usage:
        """Return the usage of a pass without gradients."""
        return self._forward_pass(self.forward)

    def in_probe(self) -> Usage:
        """Return the usage of the pass that follows a weight sync, while engines on the same device are awake."""
        return self._forward_pass(PassSize(PROBE_TOKENS, PROBE_TOKENS))

    def in_update(self) -> Usage:
        """Return the usage of an update: in the backward pass of the head or of a layer, or in the step."""
        assert self.update is not None
        size, usages = self.update, []
        for stage in self.stages():
            held = self._in_use(stage, has_gradients=True)
            kept = Usage(activations=self._kept_activations(size, stage), buffers=self._sent(size))
            usages += [held + kept + self._layer_backward(size), self._in_step(stage)]
            if stage.has_head:
                usages.append(held + kept + self._head(size, trains=True))
        return highest(*usages)

    def in_weight_sync(self) -> Usage:
        """Return the usage while every weight is added up over all ranks, whole, one after another."""
        shape, tensor = self.shape, self.settings.tensor_parallel_size
        weights = [(shape.vocabulary * shape.width, tensor), (shape.width * shape.mlp, tensor)]
        if shape.experts:
            weights[1] = (2 * shape.experts * shape.width * shape.mlp, self.settings.expert_parallel_size)
        most = max(2 * SYNC_BYTES * size + self._compute * (size // ranks) for size, ranks in weights)
        return highest(*(self._in_use(stage) + Usage(buffers=most) for stage in self.stages()))

    def in_save(self) -> Usage:
        """Return the usage while weights and moments are gathered in float32, one after another, into host memory."""
        shape, tensor = self.shape, self.settings.tensor_parallel_size
        largest = max(shape.vocabulary * shape.width // tensor, 2 * shape.width * shape.mlp)
        return highest(*(self._in_use(stage) + Usage(buffers=4 * largest) for stage in self.stages()))

    @property
    def saved_bytes(self) -> int:
        """The bytes of weights and moments that a rank copies to host memory for a checkpoint."""
        return max(12 * sum(self.count_parameters(stage)) for stage in self.stages())

    def exchanged_bytes(self, *, trains: bool) -> int:
        """Return the bytes that a rank sends over the network for its share of a micro-batch's tokens.

        Gradients and weights are exchanged once per update.
        """
        largest = max(sum(self.count_parameters(stage)) for stage in self.stages())
        share = self.settings.model_parallel_size / self.micro_batches
        return int((4 + self._compute) * largest * share) if trains else 0

    def exchanges(self) -> Iterator[tuple[int, float]]:
        """Yield (neighbors, bytes per token that a rank sends to them in a forward pass).

        Tensor parallel ranks gather and scatter hidden states twice per layer, context parallel ones exchange heads
        around attention, and tokens go to their experts and back. What stages send is little, and not counted.
        """
        settings, shape = self.settings, self.shape
        tensor, context, expert = (
            settings.tensor_parallel_size,
            settings.context_parallel_size,
            settings.expert_parallel_size,
        )
        kv_width = shape.kv_width * count_repeats(shape.kv_heads // tensor, context)
        size = self._compute * shape.layers
        yield tensor, size * 4 * (tensor - 1) * shape.width
        yield tensor * context, size * 2 * (shape.attention_width + kv_width) * (context - 1) / context
        yield expert, size * 2 * shape.experts_per_token * shape.width * (expert - 1) / expert

    def copied_bytes(self, micro_batches: float, updates: int) -> float:
        """Return the bytes between device and host memory, for a pass of so many micro-batches and their updates."""
        weights = max(1, updates) * self.settings.param_offload
        moments = updates * self.settings.optimizer_offload
        return max(2 * (weights * self._weights(each) + moments * self._optimizer(each)) for each in self.stages())

    @property
    def waiting(self) -> float:
        """How much longer an update takes because stages wait for each other at its start and end."""
        return 1 + (self.settings.pipeline_parallel_size - 1) / self.micro_batches

    def _weights(self, stage: Stage) -> int:
        return self._compute * sum(self.count_parameters(stage))

    def _gradients(self, stage: Stage) -> int:
        return 4 * sum(self.count_parameters(stage)) if self.settings.trainable else 0

    def _optimizer(self, stage: Stage, *, has_stepped: bool = True) -> int:
        """Float32 weights, unless they are the model's own, and two moments, over the copies of the model."""
        if not self.settings.trainable:
            return 0
        size = (4 if self._compute < 4 else 0) + (8 if has_stepped else 0)
        return size * self._count_shard(stage)

    def _count_shard(self, stage: Stage) -> int:
        """Return the parameters that this rank optimizes; experts have other copies than the rest."""
        settings, (dense, experts) = self.settings, self.count_parameters(stage)
        copies = self.ranks // settings.model_parallel_size
        expert_copies = self.ranks // (settings.pipeline_parallel_size * settings.expert_parallel_size)
        return -(-dense // copies) + -(-experts // expert_copies)

    def _in_use(self, stage: Stage, *, has_gradients: bool = False) -> Usage:
        """Return what is on the device while the model computes."""
        settings = self.settings
        return Usage(
            weights=self._weights(stage),
            gradients=self._gradients(stage) if has_gradients or not settings.grad_offload else 0,
            moments=0 if settings.optimizer_offload else self._optimizer(stage),
        )

    def _in_step(self, stage: Stage) -> Usage:
        """Return the usage with the optimizer on the device, and a temporary of its step."""
        moments, buffers = self._optimizer(stage), 4 * self._count_shard(stage)
        return Usage(self._weights(stage), self._gradients(stage), moments, buffers=buffers)

    def _forward_pass(self, size: PassSize) -> Usage:
        usages = []
        for stage in self.stages():
            held = self._in_use(stage) + Usage(buffers=self._sent(size))
            usages.append(
                held + Usage(activations=self._per_layer(size, self.shape.forward_token_bytes(self._compute)))
            )
            if stage.has_head:
                usages.append(held + self._head(size, trains=False))
        return highest(*usages)

    def _layer_backward(self, size: PassSize) -> Usage:
        gathered = GATHERED * self._compute * size.tokens * self.shape.width
        return Usage(
            activations=self._per_layer(size, self.shape.backward_token_bytes(self._compute)), buffers=gathered
        )

    def _head(self, size: PassSize, *, trains: bool) -> Usage:
        """Return the usage of the last layer, chunk by chunk; a rank has the logits of its part of the vocabulary."""
        b, shape, tensor = self._compute, self.shape, self.settings.tensor_parallel_size
        states = b * shape.width * (size.tokens + (2 if trains else 1) * size.trained)
        if shape.has_value_head:
            return Usage(activations=states)
        part = -(-shape.vocabulary // tensor)
        default = default_chunk(self.settings.device, shape.vocabulary)
        chunk = min(self.settings.logprob_chunk or default, size.trained)
        gradient = (4 + b) * part * shape.width if trains else 0
        return Usage(activations=states, logits=CHUNKS * 4 * chunk * part + gradient)

    def _kept_activations(self, size: PassSize, stage: Stage) -> int:
        """Return what the forward passes in flight keep of all layers of a stage, and of its output."""
        shape = self.shape
        output = self._compute * self._own_tokens(size) * shape.width
        if self.settings.gradient_checkpointing:
            return stage.in_flight * output * (stage.layers + 1)
        return stage.in_flight * (
            stage.layers * self._per_layer(size, self.shape.saved_token_bytes(self._compute)) + output
        )

    def _per_layer(self, size: PassSize, token_bytes: int) -> int:
        """Return the bytes of a layer; ranks of a tensor parallel group have a part of the tokens, or of the heads."""
        return self._own_tokens(size) * token_bytes

    def _own_tokens(self, size: PassSize) -> int:
        return -(-size.tokens // self.settings.tensor_parallel_size)

    def _sent(self, size: PassSize) -> int:
        """Return the buffers of hidden states from and to other stages."""
        if self.settings.pipeline_parallel_size == 1:
            return 0
        return 2 * self._compute * self._own_tokens(size) * self.shape.width

    @property
    def _compute(self) -> int:
        return itemsize(self.settings.compute_dtype)
