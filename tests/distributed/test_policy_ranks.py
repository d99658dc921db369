"""Two real ranks take the same steps as one, though the responses to a prompt are spread over both."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks
from tiny import save_family, tiny_qwen2
from transformers import Qwen2ForCausalLM, Qwen2ForTokenClassification

from verl.algorithms.settings import AlgorithmSettings, Correction, Distillation, KlController, LossOptions, Rejection
from verl.config.batch_sizes import BatchSizes
from verl.data.plan import Planner
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.policy.prime import PrimeRewardModel
from verl.training.policy.trainer import PolicyTrainer
from verl.training.process_group import init_process_group
from verl.training.settings import Schedule
from verl.types import Sample, SampleHandle

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

METHODS = {
    "ppo": AlgorithmSettings("gae", reward_kl=KlController(0.05, adaptive=True, horizon=100)),
    "grpo": AlgorithmSettings(
        "grpo",
        loss_kl_coef=0.1,
        entropy_coeff=0.01,
        correction=Correction("token", reject=(Rejection("sequence", 0.5, 2.0),)),
    ),
    "dpo": AlgorithmSettings("grpo", loss_mode="dpo", loss_options=LossOptions(dpo_beta=0.5)),
    "kl_cov": AlgorithmSettings(
        "grpo", loss_mode="kl_cov", loss_options=LossOptions(kl_cov_ratio=0.1, ppo_kl_coef=1.0)
    ),
    "clip_cov": AlgorithmSettings(
        "grpo",
        loss_mode="clip_cov",
        loss_options=LossOptions(clip_cov_ratio=0.3, clip_cov_lb=-5.0, clip_cov_ub=5.0),
    ),
    "optimal token baseline": AlgorithmSettings("optimal_token_baseline", correction=Correction("token")),
    "prime": AlgorithmSettings("prime"),
    "distillation": AlgorithmSettings("grpo", distillation=Distillation("reward", 0.5)),
    "exact distillation": AlgorithmSettings(
        "no_rewards", loss_kl_coef=0.1, loss_kl_type="full", distillation=Distillation("loss")
    ),
}
PROMPTS, ANSWERS, STEPS = 5, 4, 2
SPARE = 5e-6
"""How far numbers of order one may be apart. They are float32 sums in another order, exact to about 1e-7; two steps
make 7e-7 of that. AdamW's eps is large, else it would make whole steps of gradients that are nothing but rounding."""


def samples():
    random = np.random.default_rng(0)
    results = []
    for group in range(PROMPTS):
        prompt = random.integers(64, size=random.integers(2, 6))
        for _ in range(ANSWERS):
            response = random.integers(64, size=random.integers(1, 12))
            mask = np.array([False] * len(prompt) + [True] * len(response))
            mask[len(prompt) + 1 : len(prompt) + 3] = False  # tool output
            logprobs = np.where(mask, -4.2 + 0.3 * random.standard_normal(len(mask)), 0.0)
            results.append(
                Sample(
                    group=group,
                    tokens=np.concatenate([prompt, response]).astype(np.int32),
                    mask=mask,
                    logprobs=logprobs.astype(np.float32),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                    score=float(random.integers(0, 3)) / 2,
                )
            )
    return results


def plan(ranks):
    handles = [
        SampleHandle(k, one.group, len(one.tokens), int(one.mask.sum()), one.score, 0, index=k % ANSWERS)
        for k, one in enumerate(samples())
    ]
    return Planner(ranks, BatchSizes(3, None, 40), critic=BatchSizes(4, None, 60)).plan(handles)


def engine(path, **changes):
    return FsdpEngine(
        FsdpSettings(str(path), **{"schedule": Schedule(1e-2), "eps": 1e-3, "weight_decay": 0.0, **changes})
    )


def policy(name, root):
    process = None
    if name == "prime":
        process = PrimeRewardModel(
            engine(root / "model", role="process"), engine(root / "model", trainable=False), beta=0.5
        )
    return PolicyTrainer(
        engine(root / "model"),
        METHODS[name],
        reference=engine(root / "other", trainable=False),
        critic=engine(root / "critic", head="value", role="critic") if name == "ppo" else None,
        prime=process,
        teacher=engine(root / "teacher", trainable=False) if METHODS[name].distillation else None,
    )


def scenario(root):
    """Return the metrics of every step and the final weights, for every algorithm."""
    results = {}
    custom = plan(dist.get_world_size()).ranks[dist.get_rank()]
    local = [samples()[k] for k in custom.refs]
    for name in METHODS:
        trained = policy(name, root)
        metrics = [trained.prepare(local, custom) | trained.update(custom) for _ in range(STEPS)]
        models = {"actor": trained.actor, "critic": trained.critic}
        models["process"] = trained.prime and trained.prime.model
        weights = {
            f"{role}.{weight}": tensor.clone()
            for role, model in models.items()
            if model is not None
            for weight, tensor in model.weights()
        }
        results[name] = {"metrics": metrics, "weights": weights}
    return results


def two_ranks(rank, port, root):
    torch.set_num_threads(1)
    init_process_group(rank, 2, "127.0.0.1", port)
    torch.save(scenario(root), root / f"found-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Run one rank here, then two in separate processes."""
    root = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2()).save_pretrained(root / "model")
    Qwen2ForCausalLM(tiny_qwen2()).save_pretrained(root / "other")
    save_family("Llama 3", root / "teacher", num_hidden_layers=1, hidden_size=96, vocab_size=80)  # with padding
    Qwen2ForTokenClassification(tiny_qwen2(num_labels=1)).save_pretrained(root / "critic")
    init_process_group(0, 1, "127.0.0.1", 0)
    try:
        one = scenario(root)
    finally:
        dist.destroy_process_group()
    run_ranks(two_ranks, 2, free_port(), root, deadline_s=500)
    return one, [torch.load(root / f"found-{rank}.pt", weights_only=False) for rank in range(2)]


def test_the_responses_to_a_prompt_are_on_both_ranks():
    first, second = (set(custom.groups.tolist()) for custom in plan(2).ranks)
    assert first & second


@pytest.mark.parametrize("name", METHODS)
def test_both_ranks_report_the_same(both, name):
    _, (first, second) = both
    for one, other in zip(first[name]["metrics"], second[name]["metrics"], strict=True):
        assert one == other


@pytest.mark.parametrize("name", METHODS)
def test_metrics_do_not_depend_on_the_number_of_ranks(both, name):
    one, (two, _) = both
    for metrics, expected in zip(two[name]["metrics"], one[name]["metrics"], strict=True):
        assert metrics == pytest.approx(expected, rel=SPARE, abs=SPARE)
        assert metrics["actor/grad_norm"] > 1e-3
        assert metrics["actor/skipped_steps"] == 0


@pytest.mark.parametrize("name", METHODS)
def test_the_new_weights_do_not_depend_on_the_number_of_ranks(both, name):
    one, (two, other) = both
    assert two[name]["weights"].keys() == one[name]["weights"].keys() == other[name]["weights"].keys()
    for weight, expected in one[name]["weights"].items():
        torch.testing.assert_close(two[name]["weights"][weight], expected, atol=SPARE, rtol=SPARE, msg=weight)
        assert torch.equal(two[name]["weights"][weight], other[name]["weights"][weight])


@pytest.mark.parametrize("name", METHODS)
def test_algorithms_differ(both, name):
    """Otherwise the tests above would pass for a trainer that ignores its algorithm."""
    one, _ = both
    weight = "actor.model.layers.0.mlp.down_proj.weight"
    assert all(
        (one[name]["weights"][weight] - one[other]["weights"][weight]).abs().max() > 100 * SPARE
        for other in one
        if other != name
    )
