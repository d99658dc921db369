"""Routers of MoE models in training: recording and replaying their choice, and balancing their load."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.data.flat_batch import FlatBatch
from verl.errors import EngineError
from verl.training.fsdp.shared_prompts import SharedPrompts
from verl.training.sequence_parallel import SequenceGroup
from verl.training.settings import EngineSettings


class MoERouting:
    """Controls the routers of a model with L layers, some of which have E experts, k of them per token.

    **Replay.** The experts of a batch replace a router's choice. Their weights are still the current router's
    probabilities, so that gradients reach it.

    **Load balancing.** The auxiliary loss is E * sum over experts of f * P, averaged over the MoE layers: f
    is the expert's number of choices per token, P its mean probability, both over all tokens of the mini-batch. f is
    counted on all ranks before the first backward, from the experts of the batches, so that the loss is a sum over
    tokens and does not depend on micro-batches.

    State lasts until the next `begin`: with gradient checkpointing, the backward pass recomputes the same choice.
    In a sequence group, routers see a rank's part of the tokens.
    """

    def __init__(self, layers: Sequence[nn.Module], settings: EngineSettings, group: SequenceGroup | None) -> None:
        path = settings.model_path
        self._routers = {index: router for index, layer in enumerate(layers) for router in _find_routers(layer)}
        if not self._routers:
            raise EngineError(f"model {path}: it is not an MoE, so there is no routing to replay or balance")
        self._depth, self._experts = len(layers), next(iter(self._routers.values())).num_experts
        self._replays, self._coefficient, self._group = settings.router_replay, settings.router_aux_loss_coef, group
        self._load: Tensor | None = None
        for index, router in self._routers.items():
            _check_router(router, path)
            router.register_forward_hook(partial(self._route, index))
        self.begin(None)

    def count_load(self, micro_batches: Sequence[FlatBatch]) -> None:
        """Count the choices of a mini-batch over all ranks, for its auxiliary loss. Collective."""
        if not self._coefficient:
            return
        counts = torch.zeros(self._depth * self._experts, dtype=torch.float64)
        tokens = torch.tensor([sum(batch.num_tokens for batch in micro_batches)], dtype=torch.float64)
        starts = torch.arange(self._depth)[:, None] * self._experts
        for batch in filter(len, micro_batches):
            if batch.routed_experts is None:
                raise EngineError("the auxiliary loss of routers needs the experts of each token, but a batch has none")
            is_known = batch.routed_experts >= 0
            counts += torch.bincount((starts + batch.routed_experts)[is_known], minlength=len(counts))
        dist.all_reduce(counts)
        dist.all_reduce(tokens)
        if self._group is not None:  # its ranks have the same batches
            counts, tokens = counts / self._group.size, tokens / self._group.size
        scale = self._experts / (len(self._routers) * float(tokens.clamp(min=1.0)) ** 2)
        self._load = (counts * scale).float().view(self._depth, self._experts)

    def begin(
        self,
        experts: Tensor | None,
        tokens: int = 0,
        gradient_scale: float = 1.0,
        shared: SharedPrompts | None = None,
    ) -> None:
        """Prepare a forward pass on `tokens` tokens with these `experts` [T, L, k]; -1 where the router decides itself.

        `gradient_scale` multiplies the auxiliary loss in the backward pass. An empty batch has no experts. Tokens of
        `shared` prompts are routed once, and count in the loss for each of their sequences.
        """
        self._shared, self._tokens = shared, tokens if shared is None else len(shared.computed)
        self._counts = None if shared is None else shared.counts[:, None]
        self._given = experts if self._replays else None
        if self._given is not None and shared is not None:
            self._given = self._given[shared.computed]
        if self._group is not None and experts is not None:
            counts = experts.new_ones(tokens, 1) if self._counts is None else self._counts
            self._counts = self._group.take(counts)  # padding counts 0
            self._given = None if self._given is None else self._group.take(self._given)
        self._adds_loss = experts is not None and self._load is not None and torch.is_grad_enabled()
        self._gradient_scale = gradient_scale * self._coefficient
        self._chosen: dict[int, Tensor] = {}
        self._losses: dict[int, Tensor] = {}

    def recorded(self) -> Tensor:
        """Return the experts [T, L, k] that were used, as int16; 0 in layers without a router."""
        zeros = torch.zeros_like(next(iter(self._chosen.values())))
        chosen = torch.stack([self._chosen.get(index, zeros) for index in range(self._depth)], dim=1)
        if self._group is not None:
            chosen = self._group.gather(chosen.int(), self._tokens).to(torch.int16)
        return chosen if self._shared is None else chosen[self._shared.rows]

    def metrics(self) -> dict[str, Tensor]:
        """Return the micro-batch's share of the auxiliary loss, before its coefficient."""
        if not self._adds_loss:
            return {}
        return {"actor/router_aux_loss": torch.stack([*self._losses.values()]).sum()}

    def _route(self, index: int, router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits, scores, chosen = output
        if self._given is not None:
            given = self._given[:, index].long()
            chosen = torch.where(given >= 0, given, chosen)
            scores = _weigh(router, logits, chosen)
        self._chosen[index] = chosen.to(torch.int16)
        if self._adds_loss:
            assert self._load is not None
            load, probabilities = self._load[index].to(logits.device), logits.softmax(-1, dtype=torch.float32)
            load = load.expand(len(logits), -1) if self._counts is None else self._counts * load
            self._losses[index] = (probabilities.detach() * load).sum()
            scores = _AddGradient.apply(scores, probabilities, load * self._gradient_scale)
        return logits, scores, chosen


class _AddGradient(torch.autograd.Function):
    """Return `values` unchanged, and add `gradient` to the gradient of `source`.

    So the auxiliary loss enters the backward pass inside its layer, whose weights FSDP has gathered by then.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, source: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return grads[0], gradient, None


def _find_routers(layer: nn.Module) -> list[Any]:
    return [module for module in layer.modules() if type(module).__name__.lower().endswith("topkrouter")]


def _weigh(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """Return the weights [T, k] of the chosen experts, as a softmax router computes them."""
    scores = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
    if getattr(router, "norm_topk_prob", True):
        scores = scores / scores.sum(-1, keepdim=True)
    return scores.to(logits.dtype)


@torch.no_grad()
def _check_router(router: Any, path: str) -> None:
    """Raise unless the weights of a router's own choice are those of `_weigh`."""
    tensors = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in (*router.named_parameters(), *router.named_buffers())
    }
    weight = tensors["weight"]
    states = torch.randn(8, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight)
    output = torch.func.functional_call(router, tensors, (states,))
    if len(output) != 3 or not torch.allclose(_weigh(router, output[0], output[2]), output[1], atol=1e-3):
        raise EngineError(
            f"model {path}: its router ({type(router).__name__}) does not weigh experts by a softmax over all of them; "
            "only such routers can be replayed and balanced"
        )
