"""Megatron's distributed optimizer: AdamW whose float32 weights and moments are sharded over data parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from verl.errors import EngineError
from verl.training.megatron.parallel_state import add_bytes
from verl.training.offload import iter_moments
from verl.training.optim.optimizers import optimizer_options
from verl.training.settings import EngineSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """AdamW over the parameters of a stage, dense ones and experts.

    Attributes:
        steps: Optimizer steps so far, of which the moments are corrected for their start.
    """

    def __init__(self, model: DistributedDataParallel, settings: EngineSettings) -> None:
        self._model, self._settings, self.steps = model, settings, 0
        options = OptimizerConfig(
            optimizer="adam",
            lr=settings.schedule.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=0.0,  # this class clips
            bf16=settings.compute_dtype == "bfloat16",
            params_dtype=getattr(torch, settings.compute_dtype),
            use_distributed_optimizer=True,
        )
        self._chain = get_megatron_optimizer(options, [model], use_gloo_process_groups=False)
        for part in self._parts():
            if not isinstance(part.optimizer, torch.optim.AdamW):
                raise EngineError(
                    f"strategy=megatron: {type(part.optimizer).__module__} takes the place of torch's AdamW, since "
                    "Transformer Engine or Apex is installed; its state cannot be saved yet, so uninstall them"
                )

        self._shards = [_map_shards(part) for part in self._parts()]

    def step(self, lr: float, *, should_step: bool) -> tuple[float, bool]:
        """Clip and step, unless the gradient is not finite: (gradient norm, has stepped). Clears gradients."""
        self._chain.prepare_grads()
        norm = float(self._chain.get_grad_norm())
        should_step = should_step and math.isfinite(norm)
        if should_step:
            for part in self._parts():
                if self._settings.grad_clip is not None:
                    clip_grad_by_total_norm_fp32(part.get_parameters(), self._settings.grad_clip, norm)
                for group in part.optimizer.param_groups:
                    # Megatron exempts biases and norms from weight decay; other engines do not.
                    group.update(optimizer_options(self._settings) | {"lr": lr})
            self._chain.step_with_ready_grads()
            self.steps += 1
        self.clear_gradients()
        return norm, should_step

    def clear_gradients(self) -> None:
        self._model.zero_grad_buffer()
        self._chain.zero_grad()

    def gradient_norm(self) -> float:
        """Return the norm of the gradient over all ranks, and clear it."""
        self._chain.prepare_grads()
        norm = float(self._chain.get_grad_norm())
        self.clear_gradients()
        return norm

    def gather(self, module: nn.Module, key: str, read: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the float32 weights ("param") or a moment of all parameters of a stage, in host memory. Collective.

        `read` returns the values of a tensor, which may be in host memory.
        """
        gathered = {}
        for name, parameter in module.named_parameters():
            part, shards = self._find(parameter)
            whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if parameter in shards:
                own, start, stop = shards[parameter]
                values = own if key == "param" else part.optimizer.state.get(own, {}).get(key)
                if values is not None:
                    whole[start:stop] = read(values).view(-1)
            add_bytes(whole, part.data_parallel_group)
            gathered[name] = whole.view(parameter.shape).cpu()
        return gathered

    @torch.no_grad()
    def scatter(self, module: nn.Module, key: str, values: dict[str, Tensor]) -> None:
        """Set what `gather` returns."""
        for name, parameter in module.named_parameters():
            part, shards = self._find(parameter)
            if parameter not in shards:
                continue
            own, start, stop = shards[parameter]
            new = values[name].reshape(-1)[start:stop].to(own)
            if key == "param":
                own.copy_(new.view(own.shape))
            else:
                state = part.optimizer.state.setdefault(own, {})
                state["step"] = torch.tensor(float(self.steps))
                state[key] = new.view(own.shape).clone()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the float32 weights and the moments that this rank has."""
        for part in self._parts():
            for group in part.optimizer.param_groups:
                yield from group["params"]
            yield from iter_moments(part.optimizer)

    def reload_weights(self) -> None:
        """Copy the model's weights to the float32 ones, after they were changed from outside."""
        self._chain.reload_model_params()

    def _parts(self) -> Iterator[DistributedOptimizer]:
        for part in self._chain.chained_optimizers:
            if not part.is_stub_optimizer:
                yield part

    def _find(self, parameter: Tensor) -> tuple[DistributedOptimizer, dict[Tensor, tuple[Tensor, int, int]]]:
        """Return the part that has a parameter, the dense one or that of the experts, and the shards of that part."""
        for part, shards in zip(self._parts(), self._shards, strict=True):
            if any(parameter in buffer.param_index_map for buffer in part.buffers):
                return part, shards
        raise AssertionError("every parameter of a trained model has an optimizer")


def _map_shards(part: DistributedOptimizer) -> dict[Tensor, tuple[Tensor, int, int]]:
    """Return this rank's float32 shard of each parameter of which it has one, and where it begins and ends.

    Megatron's own map of them (`model_param_group_index_map`) is wrong if some parameters are float32 and others not.
    """
    groups = [
        *zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True),
        *zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True),
    ]
    shards = {}
    for parameters, own in groups:
        for parameter, shard in zip(parameters, own, strict=True):
            place = part._get_model_param_range_map(parameter)["param"]
            shards[parameter] = shard, place.start, place.end
    return shards


class GradientBuffers:
    """The gradients of a model; with `active` their memory is free while it is idle, when they are all 0."""

    def __init__(self, model: nn.Module, *, active: bool) -> None:
        names = ("buffers", "expert_parallel_buffers")
        is_trained = active and isinstance(model, DistributedDataParallel)
        buffers = [buffer for name in names for buffer in getattr(model, name)] if is_trained else []
        self._storages = [buffer.grad_data.untyped_storage() for buffer in buffers]
        self._sizes = [storage.nbytes() for storage in self._storages]

    def allocate(self) -> None:
        for storage, size in zip(self._storages, self._sizes, strict=True):
            if not storage.nbytes():
                storage.resize_(size).fill_(0)

    def free(self) -> None:
        for storage in self._storages:
            storage.resize_(0)
