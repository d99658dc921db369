"""A step of two ranks gives the same loss and gradient norms when one process runs it again."""

import json

import numpy as np
import pytest
import torch
from ranks import free_port, run_ranks
from tiny import tiny_qwen2
from transformers import Qwen2ForCausalLM

from verl.algorithms.settings import AlgorithmSettings
from verl.checkpoint.save import load_folders
from verl.config.batch_sizes import BatchSizes
from verl.data.plan import Planner
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.policy.recorded_step import read_batch, write_step
from verl.training.policy.trainer import PolicyTrainer
from verl.training.process_group import close_process_group, init_process_group
from verl.training.settings import Schedule
from verl.types import Sample, SampleHandle

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200), pytest.mark.rotating(1)]

VOCABULARY, STEPS = 64, 3


def make_samples(step):
    random = np.random.default_rng(step)
    for index in range(14):
        prompt, response = (random.integers(VOCABULARY, size=random.integers(1, 12)) for _ in range(2))
        mask = np.repeat([False, True], [len(prompt), len(response)])
        yield Sample(
            group=index // 2,
            tokens=np.concatenate([prompt, response]).astype(np.int32),
            mask=mask,
            logprobs=np.where(mask, random.normal(-4.0, 0.3, len(mask)), 0.0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            score=float(random.random()),
            index=index % 2,
        )


def plan_step(step, ranks):
    """Return the samples and the plan of each rank: uneven mini-batches of several micro-batches, two epochs."""
    samples = list(make_samples(step))
    handles = [
        SampleHandle(k, one.group, len(one.tokens), int(one.mask.sum()), one.score, 0, index=one.index)
        for k, one in enumerate(samples)
    ]
    sizes = BatchSizes(3, 2, None, 2)
    plans = Planner(ranks, sizes, critic=BatchSizes(4, 3, None), shuffle_seed=1).plan(handles).ranks
    return [([samples[k] for k in plan.refs], plan) for plan in plans]


def make_policy(folder, estimator):
    settings = FsdpSettings(str(folder / "model"), schedule=Schedule(1e-2), grad_clip=0.1)
    critic = None
    if estimator == "gae":
        critic = FsdpEngine(FsdpSettings(str(folder / "model"), head="value", role="critic", schedule=Schedule(1e-2)))
    return PolicyTrainer(FsdpEngine(settings), AlgorithmSettings(estimator, entropy_coeff=0.01), critic=critic)


def train(rank, folder, estimator, ranks, port):
    """Train some steps, and record the last one: by then the optimizer has a state."""
    init_process_group(rank, ranks, "127.0.0.1", port)
    policy = make_policy(folder, estimator)
    for step in range(STEPS):
        samples, plan = plan_step(step, ranks)[rank]
        if step == STEPS - 1:
            write_step(folder / "step", policy, samples, plan)
        metrics = policy.prepare(samples, plan) | policy.update(plan)
    if rank == 0:
        (folder / "metrics.json").write_text(json.dumps(metrics))
    close_process_group()


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_one_process_repeats_the_step_of_two_ranks(tmp_path, estimator):
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2()).save_pretrained(tmp_path / "model")
    run_ranks(train, 2, tmp_path, estimator, 2, free_port(), deadline_s=150)
    expected = json.loads((tmp_path / "metrics.json").read_text())
    init_process_group(0, 1, "127.0.0.1", 0)
    try:
        policy, batch = make_policy(tmp_path, estimator), read_batch(tmp_path / "step")
        policy.load_states(load_folders(policy.states(), tmp_path / "step"))
        metrics = policy.prepare(batch.samples, batch.plan) | policy.update(batch.plan)
    finally:
        close_process_group()
    assert (batch.ranks, len(batch.samples), len(batch.plan.policy)) == (2, 14, 6)
    assert metrics.keys() == expected.keys()
    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert metrics["actor/grad_norm"] > 0.01
