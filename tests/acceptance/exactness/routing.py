"""Train a mixture of experts with and without routing replay, and compare the gap between trainer and engine.

make show-routing [ARGS=--short]

A tiny Qwen3-MoE with random weights is trained twice by GRPO, from the same weights and seeds, on responses of a real
vLLM; trainer and engine compute in bfloat16, as on GPUs. Without replay each of them routes tokens itself, and where
two experts are nearly tied they choose differently. With `router_replay.mode=R3` the trainer uses the engine's choice.
Compared is the mean |p_trainer - p_engine| of the generated tokens before each update, which is the metric
`training/rollout_probs_diff_mean`, and the share of experts on which the two disagree.
"""

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from _common import finish
from ranks import free_port
from tiny import save_family
from transformers.utils.logging import disable_progress_bar

from verl.agents.transcript import Transcript
from verl.algorithms.settings import AlgorithmSettings
from verl.config.batch_sizes import BatchSizes
from verl.data.flat_batch import FlatBatch
from verl.data.plan import Planner
from verl.rollout.engine import load_weights
from verl.rollout.vllm.engine import VllmEngine
from verl.rollout.vllm.settings import VllmSettings
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.policy.trainer import PolicyTrainer
from verl.training.process_group import init_process_group
from verl.training.settings import Schedule
from verl.types import SampleHandle, SamplingParams
from verl.weights.bucket import pack

VOCABULARY, EXPERTS, TOP = 128, 16, 4
GAP = "training/rollout_probs_diff_mean"
LIMIT = 0.8  # of the gap without replay; what remains is the rounding of bfloat16
UPDATES, PROMPTS, RESPONSES, LENGTH = 10, 8, 8, 32


async def generate(engine, step):
    """Return the samples of a step: `RESPONSES` to each of `PROMPTS` random prompts, scored by their even tokens."""
    draw = np.random.default_rng(step)
    prompts = [draw.integers(3, VOCABULARY, 12).tolist() for _ in range(PROMPTS)]
    requests = [
        (prompt, SamplingParams(LENGTH, seed=1000 * step + 100 * group + index))
        for group, prompt in enumerate(prompts)
        for index in range(RESPONSES)
    ]
    samples = []
    for (prompt, sampling), completion in zip(requests, await engine.generate_all(requests), strict=True):
        transcript = Transcript()
        transcript.add(prompt, completion)
        score = float(np.mean([token % 2 == 0 for token in completion.token_ids]))
        samples += transcript.to_samples(sampling.seed // 100, 0, score, {})
    return samples


def plan_step(samples):
    handles = [
        SampleHandle(i, sample.group, len(sample.tokens), int(sample.mask.sum()), sample.score, 0, index=i % RESPONSES)
        for i, sample in enumerate(samples)
    ]
    [plan] = Planner(1, BatchSizes(PROMPTS, 16, None)).plan(handles).ranks
    return [samples[i] for i in plan.refs], plan


def disagreement(actor, samples):
    """Return the share of the engine's experts that the trainer's own routers do not choose."""
    batch = FlatBatch.from_samples(samples)
    [output] = actor.forward([batch.with_(routed_experts=None)])
    is_known = batch.routed_experts[:, 0, 0] >= 0
    engine, own = batch.routed_experts[is_known], output.routed_experts[is_known]
    return 1.0 - float((engine[..., None] == own[..., None, :]).any(-1).double().mean())


async def train(engine, model, *, replay, updates):
    """Return the gap before each update, and the disagreement of the last one."""
    settings = FsdpSettings(model, compute_dtype="bfloat16", schedule=Schedule(1e-3), router_replay=replay)
    policy, gaps, share = PolicyTrainer(FsdpEngine(settings), AlgorithmSettings()), [], None
    for step in range(updates + 1):  # the last one only measures
        await load_weights(engine, [*pack(policy.actor.weights(torch.bfloat16), max_bytes=1 << 20)], step)
        samples, plan = plan_step(await generate(engine, step))
        gaps.append(policy.prepare(samples, plan)[GAP])
        share = disagreement(policy.actor, samples) if replay else None
        if step < updates:
            policy.update(plan)
    return gaps, share


async def compare(folder, updates):
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": TOP, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
    model = save_family("Qwen3-MoE", folder / "model", **sizes)
    engine = VllmEngine(
        VllmSettings(model, dtype="bfloat16", max_model_len=64, max_num_seqs=PROMPTS * RESPONSES, routed_experts=True)
    )
    await engine.start()
    try:
        without, _ = await train(engine, model, replay=False, updates=updates)
        replayed, share = await train(engine, model, replay=True, updates=updates)
    finally:
        await engine.close()
    return without, replayed, share


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="2 updates")
    updates = 2 if parser.parse_args().short else UPDATES
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    disable_progress_bar()
    torch.set_num_threads(1)
    init_process_group(0, 1, "127.0.0.1", free_port())
    with tempfile.TemporaryDirectory(prefix="verl-routing-") as folder:
        without, replayed, share = asyncio.run(compare(Path(folder), updates))
    dist.destroy_process_group()
    print("updates   gap without replay   gap with replay")
    for step, (one, other) in enumerate(zip(without, replayed, strict=True)):
        print(f"{step:7}   {one:18.5f}   {other:15.5f}")
    ratio = sum(replayed) / sum(without)
    finish(
        "routing",
        ratio <= LIMIT and replayed[-1] < without[-1] and share > 0,
        updates=updates,
        gap_without_replay=without[-1],
        gap_with_replay=replayed[-1],
        ratio_over_all_steps=round(ratio, 3),
        limit=LIMIT,
        experts_that_differ=share,
        dtype="bfloat16",
    )


if __name__ == "__main__":
    main()
