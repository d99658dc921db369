"""Measure what data types cost: errors of gradients by tokens per mini-batch, and weights that never move.

make show-precision [ARGS=--short]

The gradient of one micro-batch, as a share of a mini-batch of 448 to a million tokens, computed in float16 and bfloat16
and compared with that of float32: ||g - g0|| / ||g0||. The larger the mini-batch, the smaller the share and the numbers
that float16 must hold. Then the share of weights that differ after 200 steps of AdamW at a learning rate of
1e-6, by the type of the master weights, and the distance they moved, relative to float32.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from _common import finish
from ranks import free_port
from tiny import tiny_qwen2
from transformers import Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from verl.algorithms.aggregate import Totals
from verl.algorithms.objective import PolicyObjective
from verl.data.flat_batch import FlatBatch
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.training.settings import Schedule

TOKENS = (448, 8_192, 131_072, 1_048_576)
LIMITS = {"float16": 0.02, "bfloat16": 0.05}
MOVED = {"float32": 0.99, "bfloat16 stochastic": 0.5}


class Recorder(FsdpEngine):
    """An engine that keeps the gradient instead of stepping, of a mini-batch that has more tokens than are computed."""

    tokens = 0

    def count_totals(self, micro_batches):
        return Totals(tokens=float(self.tokens), sequences=1.0)

    def _step(self, lr, *, has_tokens):
        pieces = [parameter.grad.full_tensor().flatten() for parameter in self.model.parameters()]
        self.gradient = torch.cat(pieces).float() / self._scaler.scale
        self.optimizer.zero_grad(set_to_none=True)
        return float(self.gradient.norm()), False


def random_batch(engine, sequences, length):
    generator = torch.Generator().manual_seed(1)
    offsets = torch.arange(0, sequences * length + 1, length)
    mask = torch.ones(sequences * length, dtype=torch.bool)
    mask[offsets[:-1]] = False
    batch = FlatBatch(torch.randint(64, (sequences * length,), generator=generator), offsets, mask)
    (output,) = engine.forward([batch])
    advantages = torch.randn(sequences, generator=generator)
    return batch.with_(old_logprobs=output.logprobs, advantages=advantages[batch.segment_ids] * mask)


def gradient_errors(model):
    """Return type -> tokens of the mini-batch -> distance from the gradient in float32."""
    exact = Recorder(FsdpSettings(model))
    batch = random_batch(exact, sequences=8, length=57)
    errors = {}
    for dtype in LIMITS:
        engine, errors[dtype] = Recorder(FsdpSettings(model, compute_dtype=dtype)), {}
        for tokens in TOKENS:
            exact.tokens = engine.tokens = tokens
            exact.update([batch], PolicyObjective())
            while not engine.update([batch], PolicyObjective())["actor/grad_norm"] < torch.inf:
                engine._scaler.record(is_finite=False)  # as training does
            distance = float((engine.gradient - exact.gradient).norm() / exact.gradient.norm())
            errors[dtype][tokens] = distance
            print(f"{dtype:9} {tokens:9,} tokens per mini-batch: {distance:.2%}", flush=True)
    return errors


def movements(model, steps):
    """Return type of the master weights -> (share of weights that moved, distance relative to float32)."""
    settings = FsdpSettings(model, schedule=Schedule(1e-6), weight_decay=0.0)
    kinds = {
        "float32": settings,
        "bfloat16": replace(settings, param_dtype="bfloat16", compute_dtype="bfloat16"),
        "bfloat16 stochastic": replace(
            settings, param_dtype="bfloat16", compute_dtype="bfloat16", stochastic_rounding=True
        ),
    }
    results, direction = {}, None
    for name, each in kinds.items():
        torch.manual_seed(0)
        engine = FsdpEngine(each)
        batch = random_batch(engine, sequences=8, length=57)
        before = weights(engine)
        for _ in range(steps):
            engine.update([batch], PolicyObjective())
        change = weights(engine) - before
        direction = change if direction is None else direction
        along = float(change @ direction / (direction @ direction))  # movement in the direction of float32's
        results[name] = float((change != 0).double().mean()), along
        print(f"master weights in {name}: {results[name][0]:.1%} moved, {along:.2f} of float32's way", flush=True)
    return results


def weights(engine):
    return torch.cat([parameter.full_tensor().detach().flatten().double() for parameter in engine.model.parameters()])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="40 steps, after which fewer weights have moved")
    short = parser.parse_args().short
    disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    init_process_group(0, 1, "127.0.0.1", free_port())
    with tempfile.TemporaryDirectory() as name:
        model = str(Path(name) / "model")
        Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=True)).save_pretrained(model)
        errors = gradient_errors(model)
        moved = movements(model, 40 if short else 200)
    torch.distributed.destroy_process_group()
    is_exact = all(error <= LIMITS[dtype] for dtype, by_tokens in errors.items() for error in by_tokens.values())
    finish(
        "precision",
        is_exact and moved["float32"][0] >= MOVED["float32"] and 0.8 <= moved["bfloat16 stochastic"][1] <= 1.2,
        gradient_error={dtype: {str(k): round(v, 5) for k, v in each.items()} for dtype, each in errors.items()},
        moved={name: round(share, 4) for name, (share, _) in moved.items()},
        of_the_way={name: round(along, 3) for name, (_, along) in moved.items()},
        steps=40 if short else 200,
    )


if __name__ == "__main__":
    main()
