"""Training of Hugging Face causal models with FSDP2, as policy or critic: sharded parameters, packed sequences."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl.algorithms.aggregate import Totals
from verl.algorithms.objective import ModelOutput, ValueOutput
from verl.checkpoint.adapter import check_base, is_adapter, merge_adapter, original_name, peft_name
from verl.data.flat_batch import FlatBatch
from verl.errors import DivergenceError, EngineError
from verl.training.divergence import compute_norm, describe_nonfinite, make_probe
from verl.training.engine import KLTarget, Loss, TrainEngine, check_first_tokens, sum_metrics
from verl.training.fsdp.local_shards import find_plain_names, iter_shards
from verl.training.fsdp.lora import describe_adapter, disable_adapter, is_trainable
from verl.training.fsdp.model import PackedCausalLM, PackedValueModel
from verl.training.fsdp.model_loader import load_model
from verl.training.fsdp.rounding import rounding_noise
from verl.training.fsdp.routing import MoERouting
from verl.training.fsdp.settings import FsdpSettings
from verl.training.fsdp.sharding import shard_model
from verl.training.fsdp.shared_prompts import find_shared_prompts
from verl.training.kernels.logprobs import LastLayer, compiled_kernels
from verl.training.offload import Offloader, iter_moments, use_threads
from verl.training.optim.optimizers import LossScaler, build_optimizer, optimizer_options
from verl.training.process_group import check_divides, count_node_ranks
from verl.training.profiler import span
from verl.training.random_state import get_random_state, set_random_state
from verl.training.sequence_parallel import build_sequence_group
from verl.training.tensors import group_by_mesh, parse_dtype
from verl.types import LocalShard
from verl.weights.bucket import to_hf


class FsdpEngine(TrainEngine[Any]):
    """A `TrainEngine` on the default process group, one rank per process; see `verl.training.process_group`.

    Depending on `settings.head` it is a `TrainEngine[ModelOutput]` or a `TrainEngine[ValueOutput]`. `load` builds the
    model; tests that measure memory replace it, because they have no weights.
    """

    settings: FsdpSettings

    def __init__(
        self, settings: FsdpSettings, load: Callable[..., PackedCausalLM | PackedValueModel] = load_model
    ) -> None:
        if not dist.is_initialized():
            raise EngineError("FsdpEngine: this process has no process group; call init_process_group(...) first")
        check_divides("ulysses_sequence_parallel_size", settings.sequence_parallel_size, dist.get_world_size())
        self.settings = settings
        self.rank, self.layout = dist.get_rank(), settings.layout(dist.get_world_size())
        self.device = torch.device(settings.device)
        self.schedule = settings.schedule
        self.step = 0
        self.model = load(settings, partial(shard_model, settings=settings, world_size=self.world_size))
        config = self.model.backbone.config.get_text_config()
        self.model.sequence_group = group = build_sequence_group(settings, self.world_size, config)
        uses_routing = settings.router_replay or settings.router_aux_loss_coef
        self._routing = MoERouting(self.model.layers(), settings, group) if uses_routing else None
        self._base = None if settings.lora is None else describe_adapter(self.model, settings.lora, settings.model_path)
        self.optimizer: torch.optim.Optimizer | None = None
        if settings.trainable:
            self.optimizer = build_optimizer(self.model, settings)
        self._scaler = LossScaler(settings.compute_dtype)
        self._skipped_steps = 0  # in a row
        self.notes: list[str] = [self.model.note] if self.model.note and self.world_size > 1 else []
        self._weights = Offloader(self.model.parameters, active=settings.param_offload)
        self._moments = Offloader(lambda: iter_moments(self.optimizer), active=settings.optimizer_offload)
        self._weights.offload()
        self._step_threads = count_step_threads(settings)
        if settings.compile and isinstance(self.model, PackedCausalLM):
            self._compile_kernels(self.model)
        if settings.compile_layers:
            self._compile_layers()

    def _compile_kernels(self, model: PackedCausalLM) -> None:
        model.kernels, error = compiled_kernels(self.device, parse_dtype(self.settings.compute_dtype))
        if error is not None:
            self._note_uncompiled("the log-prob kernels", error, "actor_rollout_ref.actor.use_torch_compile")

    def _compile_layers(self) -> None:
        """Compile the layers, in a pass that shows whether that is possible. Gradients follow in the first update."""
        from verl.training.fsdp.compiled_layers import compile_layers  # loads the compiler

        compiler = compile_layers(self.model)
        if compiler is None:
            self.notes.append(f"model {self.settings.model_path}: layers with experts are not compiled")
            return
        self.forward([make_probe(self.model.backbone.config.get_text_config().vocab_size)])
        if compiler.error is not None:
            self._note_uncompiled("the layers", compiler.error, "fsdp_config.use_torch_compile")

    def _note_uncompiled(self, what: str, error: str, setting: str) -> None:
        self.notes.append(
            f"torch.compile failed, so {what} run uncompiled, with the same results but somewhat slower: {error}. "
            f"To disable it: {setting}=False"
        )

    def forward(
        self,
        micro_batches: Sequence[FlatBatch],
        *,
        temperature: float | None = None,
        reference: KLTarget | None = None,
        with_squares: bool = False,
    ) -> list[Any]:
        self.model.eval()
        outputs = []
        with self._weights.on_device(), torch.no_grad():
            for batch in micro_batches:
                output = self._run(batch, temperature, reference, with_squares=with_squares)
                if self._routing is not None and isinstance(output, ModelOutput):
                    output = output._replace(routed_experts=self._routing.recorded())
                size = batch.num_tokens
                columns: list[Any] = [None if values is None else values[:size].cpu() for values in output]
                outputs.append(type(output)(*columns))
            self.release()
        if reference is not None:
            reference.release()
        return outputs

    def release(self) -> None:
        """Free gathered parameters after forward passes without a backward; else modules would miss later updates."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self._weights.offload()

    def update(
        self,
        micro_batches: Sequence[FlatBatch],
        loss: Loss[Any],
        *,
        reference: KLTarget | None = None,
        teacher: KLTarget | None = None,
    ) -> dict[str, float]:
        if self.optimizer is None:
            raise EngineError(f"{self.settings.model_path}: cannot update a model with trainable=False")
        totals, lr = self.count_totals(micro_batches), self.schedule.at(self.step)
        if self._routing is not None:
            self._routing.count_load(micro_batches)
        self.model.train()
        shares: dict[str, Tensor] = {}
        with self._weights.on_device():
            for batch in micro_batches:
                for name, value in self._backward(batch, loss, totals, reference, teacher).items():
                    shares[name] = shares.get(name, 0.0) + value.detach()
            for frozen in (reference, teacher):
                if frozen is not None:
                    frozen.release()
            with use_threads(self._step_threads):
                norm, has_stepped = self._step(lr, has_tokens=totals.tokens > 0)
        role = self.settings.role
        metrics = {
            f"{role}/grad_norm": norm,
            f"{role}/lr": lr,
            f"{role}/skipped_steps": 0.0 if has_stepped else 1.0,
        }
        if self._scaler.is_active:
            metrics[f"{role}/loss_scale"] = self._scaler.scale
        return sum_metrics(shares) | metrics

    def advance_schedule(self) -> None:
        self.step += 1

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        weights = self._gather_weights(lambda name: True, dtype)
        if (lora := self.settings.lora) is not None:
            adapted = merge_adapter(self.base_weights(), dict(self._gather_weights(is_adapter)), lora.scale)
            weights = ((name, weight.to(dtype or weight.dtype)) for name, weight in adapted)
        return to_hf(self.model.hf, weights) if isinstance(self.model, PackedCausalLM) else weights

    def local_shards(self, dtype: torch.dtype) -> Iterator[tuple[str, LocalShard]] | None:
        """Return the shard that this rank has of each weight.

        None with an adapter, or with experts: transformers stacks those of a layer in one parameter.
        """
        return None if self._plain_names is None else self._iter_shards(self._plain_names, dtype)

    def _iter_shards(self, names: Mapping[str, str], dtype: torch.dtype) -> Iterator[tuple[str, LocalShard]]:
        with self._weights.on_device():
            yield from iter_shards(self.model.hf, names, dtype)

    @cached_property
    def _plain_names(self) -> dict[str, str] | None:
        if self.settings.lora is not None or not isinstance(self.model, PackedCausalLM):
            return None
        return find_plain_names(self.model.hf)

    def weight_shapes(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        named = [(name, each) for name, each in self.model.hf.named_parameters() if not is_adapter(name)]
        shapes = (
            (original_name(name), torch.empty(w.shape, dtype=dtype or w.dtype, device="meta")) for name, w in named
        )
        return to_hf(self.model.hf, shapes) if isinstance(self.model, PackedCausalLM) else shapes

    def adapter_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._gather_weights(is_adapter, dtype):
            yield peft_name(name), tensor

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._gather_weights(lambda name: not is_adapter(name)):
            yield original_name(name), tensor

    def _gather_weights(
        self, is_wanted: Callable[[str], bool], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        with self._weights.on_device():
            for name, parameter in self.model.hf.named_parameters():
                if is_wanted(name):
                    local = parameter.detach().to(self.device, dtype)
                    full = local.full_tensor() if isinstance(local, DTensor) else local
                    yield name, full.clone() if self._weights.active else full  # on one rank it may be the shard

    def copy_weights_from(self, other: TrainEngine[Any], ratio: float = 1.0) -> None:
        assert isinstance(other, FsdpEngine)
        source = dict(other.model.named_parameters())
        with torch.no_grad(), self._weights.on_device(), other._weights.on_device():
            for name, parameter in self.model.named_parameters():
                new = source[name].to(parameter.dtype)
                parameter.copy_(new if ratio == 1 else torch.lerp(parameter, new, ratio))

    def state(self) -> dict[str, Any]:
        """Return sharded model and optimizer, the schedule's step, and the random states under the key of this rank.

        With offloading all tensors are copied to host memory, since offloaded ones are empty. With an adapter, `model`
        has only the trainable parameters, and `base` identifies the weights that they belong to.
        """
        state: dict[str, Any] = {
            "schedule": {"step": self.step},
            "rng": {str(self.rank): get_random_state(self.device)},
        }
        if self._scaler.is_active:
            state["schedule"]["loss_scale"] = self._scaler.state()
        self._ensure_moments()
        state["model"] = get_model_state_dict(self.model.hf)
        if self._base is not None:
            state["model"] = {name: tensor for name, tensor in state["model"].items() if is_trainable(name)}
            state["base"] = dict(self._base)
        if self.optimizer is not None:
            state["optimizer"] = get_optimizer_state_dict(self.model.hf, self.optimizer, options=_FLAT)
        if self._weights.active or self._moments.active:
            state["model"] = self._weights.copy_to_host(state["model"])
            if "optimizer" in state:
                state["optimizer"] = self._moments.copy_to_host(state["optimizer"])
        return state

    def _ensure_moments(self) -> None:
        """Create the state of an optimizer that has not stepped yet.

        torch does so by a step with learning rate 0, and counts it: the first real step would be a quarter too small.
        """
        if self.optimizer is None or self.optimizer.state:
            return
        with self._weights.on_device(), self._moments.on_device():
            get_optimizer_state_dict(self.model.hf, self.optimizer, options=_FLAT)
            for moments in self.optimizer.state.values():
                moments["step"].zero_()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a `state`. Parts that it lacks are left unchanged, also the random state of a rank without one.

        The optimizer's options (betas, eps, weight decay) come from the settings, not from the checkpoint.
        """
        if self._base is not None and "base" in state:
            check_base(self._base, state["base"])
        with self._weights.on_device(), self._moments.on_device():
            if "model" in state:
                set_model_state_dict(self.model.hf, state["model"], options=StateDictOptions(strict=self._base is None))
            if self.optimizer is not None and "optimizer" in state:
                set_optimizer_state_dict(self.model.hf, self.optimizer, state["optimizer"], options=_FLAT)
                for group in self.optimizer.param_groups:
                    group.update(optimizer_options(self.settings))
        if "schedule" in state:
            self.step = int(state["schedule"]["step"])
            self._scaler.load_state(state["schedule"].get("loss_scale", self._scaler.state()))
        if random_state := state.get("rng", {}).get(str(self.rank)):
            set_random_state(random_state, self.device)

    def last_layer(self, batch: FlatBatch) -> LastLayer:
        """Return the last layer, for the KL of another model to this one. Its weight stays gathered until `release`."""
        self.model.eval()
        self._weights.load()
        with torch.no_grad():
            return cast(LastLayer, self._call(batch, 1.0, return_hidden=True))

    def rounding_noise(self, dtype: str) -> AbstractContextManager[None]:
        return rounding_noise(self.model, dtype)

    def without_adapter(self) -> BaseModelReference:
        return BaseModelReference(self)

    @span("forward")
    def _run(
        self,
        batch: FlatBatch,
        temperature: float | None = None,
        reference: KLTarget | None = None,
        teacher: KLTarget | None = None,
        *,
        moved: FlatBatch | None = None,
        with_squares: bool = False,
    ) -> ModelOutput | ValueOutput:
        temperature = self.settings.temperature if temperature is None else temperature
        others = {"reference": reference, "teacher": teacher}
        options: dict[str, Any] = {
            name: engine.last_layer(batch) for name, engine in others.items() if engine is not None
        }
        if with_squares:  # a critic has no such option
            options["with_squares"] = True
        return cast(ModelOutput | ValueOutput, self._call(batch, temperature, moved, **options))

    def _call(
        self, batch: FlatBatch, temperature: float, moved: FlatBatch | None = None, **options: Any
    ) -> ModelOutput | ValueOutput | LastLayer:
        """Call the model; `moved` is the batch on the device, if it has been copied.

        An empty batch runs two dummy tokens, so that every rank takes part in the collectives: two, because
        torch.compile compiles anew for a size of 1.
        """
        check_first_tokens(batch)
        if batch.num_tokens == 0:
            moved = None
            batch = FlatBatch(torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2]), torch.zeros(2, dtype=torch.bool))
        lengths = batch.lengths.tolist()
        shared = find_shared_prompts(batch) if self.settings.shared_prompts else None
        batch = batch.to(self.device) if moved is None else moved
        shared = None if shared is None else shared.to(self.device)
        if self._routing is not None:
            scale = self.world_size * self._scaler.scale
            self._routing.begin(batch.routed_experts, batch.num_tokens, scale, shared)
        if batch.kept_ids is not None and isinstance(self.model, PackedCausalLM):  # a critic has no such option
            options["kept_ids"] = batch.kept_ids
        return self.model(batch.tokens, batch.positions, batch.mask, lengths, temperature, shared, **options)

    def _backward(
        self,
        batch: FlatBatch,
        loss: Loss[Any],
        totals: Totals,
        reference: KLTarget | None,
        teacher: KLTarget | None,
    ) -> dict[str, Tensor]:
        moved = batch.to(self.device)
        output = self._run(batch, reference=reference, teacher=teacher, moved=moved)
        if batch.num_tokens == 0:
            # Zero gradients, but the same collectives as on other ranks.
            torch.cat([values for values in output if values is not None]).sum().backward()
            return {}
        share, metrics = loss(output, moved, totals)
        metrics = {name: value / self.layout.group_size for name, value in metrics.items()}
        with span("backward"):  # FSDP averages over ranks, but shares must be summed
            (share * self.world_size * self._scaler.scale).backward()
        return metrics if self._routing is None else {**metrics, **self._routing.metrics()}

    @span("optimizer step")
    def _step(self, lr: float, *, has_tokens: bool) -> tuple[float, bool]:
        """Clip and step, unless there are no tokens or the gradient is not finite: (gradient norm, has stepped)."""
        assert self.optimizer is not None
        grads, scale = self._grads(), self._scaler.scale
        norm = compute_norm(grads) / scale
        self._record(is_finite=math.isfinite(norm))
        should_step = has_tokens and math.isfinite(norm)
        if should_step:
            clip = self.settings.grad_clip
            factor = clip / (norm + 1e-6) if clip is not None and norm > clip else 1.0
            if factor != scale:
                for group in group_by_mesh(grads):
                    torch._foreach_mul_(group, factor / scale)
            for options in self.optimizer.param_groups:
                options["lr"] = lr
            with self._moments.on_device():
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, should_step

    def find_divergence(self) -> str:
        with self._weights.on_device():
            problem = describe_nonfinite(self.model.named_parameters())
            if problem or self.optimizer is None:
                return problem
            self.model.eval()
            self._run(make_probe(self.model.hf.config.get_text_config().vocab_size))[0].sum().backward()
            norm = compute_norm(self._grads())
            self.optimizer.zero_grad(set_to_none=True)
        self._ensure_moments()  # here the device has room for them: a save comes while engines are awake
        return "" if math.isfinite(norm) else f"the weights are finite, but the norm of a gradient is {norm}"

    def _grads(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def _record(self, *, is_finite: bool) -> None:
        """Count skipped steps, and adjust the scale of the loss; raise if too many steps in a row are skipped."""
        self._scaler.record(is_finite=is_finite)
        self._skipped_steps = 0 if is_finite else self._skipped_steps + 1
        if self._skipped_steps > self.settings.max_skipped_steps:
            raise DivergenceError(
                f"train worker: {self.settings.role}: training has diverged: the gradient was not finite in "
                f"{self._skipped_steps} updates in a row. Rerun with a lower learning rate (optim.lr) to resume from "
                "the last checkpoint, or increase trainer.faults.max_skipped_steps if this is expected."
            )


class BaseModelReference:
    """An engine with its adapter disabled: no second copy of the weights, and never updated."""

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine

    def forward(self, micro_batches: Sequence[FlatBatch], **options: Any) -> list[ModelOutput]:
        own = [batch.with_(routed_experts=None) for batch in micro_batches]  # it chooses its own experts
        with disable_adapter(self._engine.model):
            return self._engine.forward(own, **options)

    def last_layer(self, batch: FlatBatch) -> LastLayer:
        """Return the last layer without the adapter; safe in the middle of an update of the adapted model."""
        training = self._engine.model.training
        with disable_adapter(self._engine.model):
            layer = self._engine.last_layer(batch.with_(routed_experts=None))
        self._engine.model.train(training)
        return layer

    def release(self) -> None:
        self._engine.release()


def count_step_threads(settings: FsdpSettings) -> int | None:
    """Return with how many threads the optimizer computes if it runs on the CPU of a machine with GPUs. Collective.

    The cores of the machine, which have nothing else to do then, are divided by its ranks. None: as all other work.
    """
    if not (settings.trainable and settings.offload_policy) or torch.device(settings.device).type == "cpu":
        return None
    return max(1, len(os.sched_getaffinity(0)) // count_node_ranks())


_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
