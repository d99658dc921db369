"""Training of Hugging Face causal models with Megatron-Core, on packed sequences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from verl.algorithms.objective import ModelOutput, ValueOutput
from verl.checkpoint.save import get_local_shard
from verl.data.flat_batch import FlatBatch
from verl.errors import DivergenceError, EngineError
from verl.training.divergence import describe_nonfinite, make_probe
from verl.training.engine import KLTarget, Loss, TrainEngine, check_first_tokens, sum_metrics
from verl.training.kernels.attention import packing_kwargs
from verl.training.megatron.loading import StageModel, load_stage
from verl.training.megatron.logprobs import VocabularySlice, sharded_logprobs
from verl.training.megatron.optimizer import MOMENTS, GradientBuffers, ShardedAdamW
from verl.training.megatron.parallel_state import add_bytes, join_groups, last_stage_rank, pipeline_size
from verl.training.megatron.settings import MegatronSettings
from verl.training.megatron.transformer import Packing
from verl.training.offload import Offloader
from verl.training.optim.optimizers import optimizer_options
from verl.training.profiler import span
from verl.training.random_state import get_random_state, set_random_state
from verl.training.sequence_parallel import SequenceGroup
from verl.types import LocalShard
from verl.weights.bucket import to_hf

Output = ModelOutput | ValueOutput


class MegatronEngine(TrainEngine[Any]):
    """A `TrainEngine` on the default process group; all engines of a process have the same layout.

    Depending on `settings.head` it is a `TrainEngine[ModelOutput]` or a `TrainEngine[ValueOutput]`.
    """

    settings: MegatronSettings

    def __init__(self, settings: MegatronSettings) -> None:
        if not dist.is_initialized():
            raise EngineError("MegatronEngine: this process has no process group; call init_process_group(...) first")
        _check_supported(settings)
        join_groups(settings)
        self.settings, self.schedule, self.step = settings, settings.schedule, 0
        self.rank, self.layout = dist.get_rank(), settings.layout(dist.get_world_size())
        assert self.data_rank == parallel_state.get_data_parallel_rank()
        self.device = torch.device(settings.device)
        self.stage: StageModel = load_stage(settings, self.device)
        self._module, config = self.stage.module, self.stage.config
        self._forward_module: torch.nn.Module = self._module
        self.optimizer: ShardedAdamW | None = None
        if settings.trainable:
            options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
            self._forward_module = DistributedDataParallel(config, options, self._module)
            config.finalize_model_grads_func = finalize_model_grads
            self.optimizer = ShardedAdamW(self._forward_module, settings)
        context = parallel_state.get_context_parallel_group()
        self._context_group = SequenceGroup(context) if context.size() > 1 else None
        self._weights = Offloader(self._module.parameters, active=settings.param_offload)
        self._gradients = GradientBuffers(self._forward_module, active=settings.grad_offload)
        self._moments = Offloader(self._iter_moments, active=settings.optimizer_offload)
        self._skipped_steps = 0  # in a row
        self.notes = list(self.stage.notes)
        with self._awake():
            pass

    def _iter_moments(self) -> Iterator[Tensor]:
        """Yield the optimizer's tensors, except float32 weights that are the model's own."""
        if self.optimizer is not None:
            own = {each.untyped_storage()._cdata for each in self._module.parameters()}
            yield from (each for each in self.optimizer.tensors() if each.untyped_storage()._cdata not in own)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Have the weights on the device, and everything back where it rests at the end."""
        with self._weights.on_device():
            yield
        self._moments.offload()
        self._gradients.free()

    # --- computing

    def forward(
        self,
        micro_batches: Sequence[FlatBatch],
        *,
        temperature: float | None = None,
        reference: KLTarget | None = None,
        with_squares: bool = False,
    ) -> list[Any]:
        if reference is not None:
            raise self._refuse("exact_kl")
        self._forward_module.eval()

        def keep(output: Output, batch: FlatBatch) -> tuple[Tensor, Any]:
            columns: list[Any] = [None if values is None else values[: batch.num_tokens].cpu() for values in output]
            return output[0].new_zeros(()), type(output)(*columns)

        with self._awake(), torch.no_grad():
            return self._run(micro_batches, keep, temperature, with_squares=with_squares)

    def update(
        self,
        micro_batches: Sequence[FlatBatch],
        loss: Loss[Any],
        *,
        reference: KLTarget | None = None,
        teacher: KLTarget | None = None,
    ) -> dict[str, float]:
        if reference is not None or teacher is not None:
            raise self._refuse("exact_kl")
        if self.optimizer is None:
            raise EngineError(f"{self.settings.model_path}: cannot update a model with trainable=False")
        totals, lr, role = self.count_totals(micro_batches), self.schedule.at(self.step), self.settings.role
        self._forward_module.train()
        # Megatron averages over micro-batches and data ranks, but shares must be summed.
        scale = len(micro_batches) * self.layout.data_size

        def share(output: Output, batch: FlatBatch) -> tuple[Tensor, dict[str, Tensor]]:
            if batch.num_tokens == 0:  # zero gradients, but the same collectives as on other ranks
                return torch.cat([values for values in output if values is not None]).sum(), {}
            own, metrics = loss(output, batch.to(self.device), totals)
            return own * scale, {name: value.detach() for name, value in metrics.items()}

        shares: dict[str, Tensor] = {}
        with self._awake():
            self._gradients.allocate()
            for metrics in self._run(micro_batches, share):
                shares |= {name: shares.get(name, 0.0) + value for name, value in metrics.items()}
            with span("optimizer step"), self._moments.on_device():
                norm, has_stepped = self.optimizer.step(lr, should_step=totals.tokens > 0)
        copies = self.settings.ranks_per_batch
        shares = {name: value / copies for name, value in shares.items()} if self._is_last else {}
        self._count_skipped(norm)
        return sum_metrics(shares) | {
            f"{role}/grad_norm": norm,
            f"{role}/lr": lr,
            f"{role}/skipped_steps": 0.0 if has_stepped else 1.0,
        }

    def advance_schedule(self) -> None:
        self.step += 1

    @property
    def _is_last(self) -> bool:
        return bool(parallel_state.is_pipeline_last_stage())

    def _run(
        self, micro_batches: Sequence[FlatBatch], finish: Any, temperature: float | None = None, **options: Any
    ) -> list[Any]:
        """Run the pipeline's schedule; return what `finish(output, micro-batch)` returned, on every rank.

        `finish` runs in the last stage. It returns the loss of which the gradient is computed, unless gradients are
        disabled, and a result.
        """
        for batch in micro_batches:
            check_first_tokens(batch)
        temperature = self.settings.temperature if temperature is None else temperature

        def step(batches: Iterator[FlatBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
            batch = next(batches)
            group = self._context_group
            padded = _pad(batch, self.settings.ranks_per_batch)
            arguments = packing_kwargs(padded.lengths.tolist(), self.device)
            padded = padded.to(self.device)
            tokens, positions = padded.tokens, padded.positions
            if group is not None:
                arguments["count"] = padded.num_tokens
                tokens, positions = group.take(tokens), group.take(positions)
            packing = Packing(arguments=arguments, group=group)
            states = model(tokens[None], positions[None], None, packed_seq_params=packing)

            def finish_batch(states: Tensor) -> tuple[Tensor, Any]:
                return finish(self._compute_output(states, padded, batch, temperature, **options), batch)

            return states, finish_batch

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(micro_batches),
            model=[self._forward_module],
            num_microbatches=len(micro_batches),
            seq_length=1,  # sent with every batch
            micro_batch_size=1,
            forward_only=not torch.is_grad_enabled(),
        )
        if torch.is_grad_enabled() or pipeline_size() == 1:
            return results
        boxed = [results]
        dist.broadcast_object_list(
            boxed, src=last_stage_rank(), group=parallel_state.get_pipeline_model_parallel_group()
        )
        return boxed[0]

    def _compute_output(
        self, states: Tensor, padded: FlatBatch, batch: FlatBatch, temperature: float, *, with_squares: bool = False
    ) -> Output:
        """Return log-probs and entropies, or values, [T] from the last hidden states [T / ranks, 1, H]."""
        is_policy, group = self.settings.head == "tokens", self._context_group
        if self.stage.config.sequence_parallel:
            # The gradient that a rank has of the states is its share for a policy, and all of it for a critic.
            states = tensor_parallel.gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=is_policy)
        part = slice(0, padded.num_tokens) if group is None else group.part(padded.num_tokens)
        # A token is predicted from the previous token of its sequence, by the rank that has that token.
        sources = padded.mask.nonzero().squeeze(-1) - 1
        sources = sources[(sources >= part.start) & (sources < part.stop)]
        previous, targets = states.squeeze(1)[sources - part.start], sources + 1

        def place(values: Tensor) -> Tensor:
            placed = values.new_zeros(batch.num_tokens).index_copy(0, targets, values)
            return placed if group is None else group.collect(placed)

        if not is_policy:
            return ValueOutput(place(self._module.value_head(previous.float()).squeeze(-1)))
        weight = self._module.output_weight
        if self.settings.fp32_lm_head:
            previous, weight = previous.float(), weight.float()
        vocabulary = VocabularySlice(
            parallel_state.get_tensor_model_parallel_rank() * len(weight),
            self.stage.vocabulary,
            parallel_state.get_tensor_model_parallel_group(),
        )
        logprobs, entropy, *squares = sharded_logprobs(
            previous,
            weight,
            padded.tokens[targets],
            vocabulary,
            temperature=temperature,
            chunk=self.settings.logprob_chunk,
            with_squares=with_squares,
        )
        output = ModelOutput(place(logprobs), place(entropy))
        return output._replace(sum_pi_squared=place(squares[0])) if squares else output

    def _count_skipped(self, norm: float) -> None:
        self._skipped_steps = 0 if math.isfinite(norm) else self._skipped_steps + 1
        if self._skipped_steps > self.settings.max_skipped_steps:
            raise DivergenceError(
                f"train worker: {self.settings.role}: training has diverged: the gradient was not finite in "
                f"{self._skipped_steps} updates in a row. Rerun with a lower learning rate (optim.lr) to resume from "
                "the last checkpoint, or increase trainer.faults.max_skipped_steps if this is expected."
            )

    # --- weights

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        weights = self._gather_weights(dtype)
        return to_hf(self.stage.hf, weights) if self.settings.head == "tokens" else weights

    def _gather_weights(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        values = {name: parameter.detach() for name, parameter in self._module.named_parameters()}
        with self._awake():
            for name, shape in self.stage.shapes.items():
                whole = torch.zeros(shape, dtype=dtype or self.stage.dtype_of(name), device=self.device)
                box = self.stage.boxes.get(name)
                if box is not None and box.is_first:
                    whole[box.index] = box.read(values).to(whole.dtype)
                add_bytes(whole)
                yield name, whole

    def weight_shapes(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        shapes = (
            (name, torch.empty(shape, dtype=dtype or self.stage.dtype_of(name), device="meta"))
            for name, shape in self.stage.shapes.items()
        )
        return to_hf(self.stage.hf, shapes) if self.settings.head == "tokens" else shapes

    def copy_weights_from(self, other: TrainEngine[Any], ratio: float = 1.0) -> None:
        assert isinstance(other, MegatronEngine)
        source = dict(other._module.named_parameters())
        with torch.no_grad(), self._awake(), other._awake(), self._moments.on_device():
            for name, parameter in self._module.named_parameters():
                new = source[name].to(parameter.dtype)
                parameter.copy_(new if ratio == 1 else torch.lerp(parameter, new, ratio))
            if self.optimizer is not None:
                self.optimizer.reload_weights()

    # --- checkpoints

    def find_divergence(self) -> str:
        values = {name: parameter.detach() for name, parameter in self._module.named_parameters()}
        with self._awake():
            problem = describe_nonfinite((name, box.read(values)) for name, box in self.stage.boxes.items())
            if problem or self.optimizer is None:
                return problem
            self._gradients.allocate()
            self._forward_module.eval()
            self._run([make_probe(self.stage.vocabulary)], lambda output, batch: (output[0].sum(), None))
            with self._moments.on_device():
                norm = self.optimizer.gradient_norm()
        return "" if math.isfinite(norm) else f"the weights are finite, but the norm of a gradient is {norm}"

    def state(self) -> dict[str, Any]:
        """Return copies of the weights and moments in host memory, under the names and in the format of FSDP2.

        Offloaded moments pass the device one by one: engines that share it may be awake.
        """
        state: dict[str, Any] = {
            "schedule": {"step": self.step},
            "rng": {str(self.rank): get_random_state(self.device)},
        }
        with self._awake():
            state["model"] = shards = self._cut(self._master_weights())
            shards |= {name: shards[first] for name, first in self.stage.tied.items() if first in shards}
            if self.optimizer is not None:
                state["optimizer"] = self._optimizer_state(self.optimizer)
        return state

    def _optimizer_state(self, optimizer: ShardedAdamW) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for key in MOMENTS:
            moments = self._cut(optimizer.gather(self._module, key, self._moments.copy_to_host))
            entries |= {f"state.{name}.{key}": shard for name, shard in moments.items()}
        options = _group_options() | optimizer_options(self.settings)
        for name in self.stage.boxes:
            entries[f"state.{name}.step"] = torch.tensor(float(optimizer.steps))
            entries |= {f"param_groups.{name}.{option}": value for option, value in options.items()}
        return entries

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a `state`. Parts that it lacks are left unchanged, also the random state of a rank without one.

        The optimizer's options (betas, eps, weight decay) come from the settings, not from the checkpoint.
        """
        with self._awake(), self._moments.on_device(), torch.no_grad():
            if "model" in state:
                masters = self._master_weights()
                self._paste(state["model"], masters)
                for name, parameter in self._module.named_parameters():
                    parameter.copy_(masters[name])
                if self.optimizer is not None:
                    self.optimizer.scatter(self._module, "param", masters)
            if self.optimizer is not None and "optimizer" in state:
                self._load_optimizer(self.optimizer, state["optimizer"])
        if "schedule" in state:
            self.step = int(state["schedule"]["step"])
        if random_state := state.get("rng", {}).get(str(self.rank)):
            set_random_state(random_state, self.device)

    def _load_optimizer(self, optimizer: ShardedAdamW, entries: dict[str, Any]) -> None:
        optimizer.steps = int(next(value for name, value in entries.items() if name.endswith(".step")))
        for key in MOMENTS:
            moments = {name: torch.zeros(each.shape) for name, each in self._module.named_parameters()}
            self._paste({name: entries[f"state.{name}.{key}"] for name in self.stage.boxes}, moments)
            optimizer.scatter(self._module, key, moments)

    def _master_weights(self) -> dict[str, Tensor]:
        """Return the weights of this stage as the optimizer has them, in host memory."""
        if self.optimizer is not None:
            return self.optimizer.gather(self._module, "param", self._moments.copy_to_host)
        return {name: parameter.detach().float().cpu() for name, parameter in self._module.named_parameters()}

    def _cut(self, values: dict[str, Tensor]) -> dict[str, LocalShard]:
        """Return this rank's box of each parameter of transformers."""
        return {
            name: LocalShard(box.read(values), box.offsets, box.shape, torch.float32)
            for name, box in self.stage.boxes.items()
        }

    def _paste(self, shards: dict[str, Any], values: dict[str, Tensor]) -> None:
        for name, box in self.stage.boxes.items():
            tensor = get_local_shard(shards[name]).tensor
            assert tensor is not None, "a rank loads what it has"
            box.write(tensor, values)


def _check_supported(settings: MegatronSettings) -> None:
    """Raise for settings that this engine does not have, since not everyone reads them from a configuration."""
    if torch.cuda.device_count() == 0:
        raise EngineError("strategy=megatron needs CUDA devices, and this process sees none; use strategy=fsdp2")
    refused: Iterable[tuple[str, bool]] = (
        ("peft.lora_rank", settings.lora is not None),
        ("optim.name", settings.optimizer != "adamw"),
        ("stochastic_rounding", settings.stochastic_rounding),
        ("ulysses_sequence_parallel_size", settings.sequence_parallel_size > 1),
        ("use_prefix_grouper", settings.shared_prompts),
        ("router_replay.mode", settings.router_replay),
        ("router_aux_loss_coef", settings.router_aux_loss_coef != 0),
        ("dtype", settings.compute_dtype not in ("float32", "bfloat16")),
    )
    if names := [name for name, is_wanted in refused if is_wanted]:
        raise EngineError(f"{settings.role}: strategy=megatron does not support {', '.join(names)}")


def _pad(batch: FlatBatch, multiple: int) -> FlatBatch:
    """Return the tokens and sequences of a batch, and at their end one more sequence of the tokens that are missing.

    Ranks of a tensor parallel group split the tokens evenly between layers. An empty batch becomes dummy tokens.
    """
    count = -batch.num_tokens % multiple or (0 if batch.num_tokens else multiple)
    if count == 0:
        return FlatBatch(batch.tokens, batch.offsets, batch.mask)
    return FlatBatch(
        torch.cat([batch.tokens, batch.tokens.new_zeros(count)]),
        torch.cat([batch.offsets, batch.offsets[-1:] + count]),
        torch.cat([batch.mask, batch.mask.new_zeros(count)]),
    )


def _group_options() -> dict[str, Any]:
    """Return the options of a parameter group of the AdamW that FSDP2 uses, which it expects in a checkpoint."""
    group = torch.optim.AdamW([torch.zeros(1)], fused=True).param_groups[0]
    return {name: value for name, value in group.items() if name != "params"}
