"""A teacher that reads its own prompts judges a policy's responses as transformers does, and its adapter learns."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny import save_family, tiny_qwen2
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from verl.algorithms.settings import AlgorithmSettings, Distillation
from verl.checkpoint.save import load, save
from verl.config.batch_sizes import BatchSizes
from verl.data.plan import Planner
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.policy.trainer import PolicyTrainer
from verl.training.process_group import init_process_group
from verl.training.settings import LoraSettings, Schedule
from verl.types import Sample, SampleHandle

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200), pytest.mark.rotating(0)]

VOCABULARY = 64


def make_samples():
    random, results = np.random.default_rng(0), []
    for index in range(6):
        prompt, response, other = (random.integers(VOCABULARY, size=random.integers(1, 9)) for _ in range(3))
        mask = np.repeat([False, True], [len(prompt), len(response)])
        sample = Sample(
            group=index // 2,
            tokens=np.concatenate([prompt, response]).astype(np.int32),
            mask=mask,
            logprobs=np.where(mask, -4.0, 0.0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            score=0.0,
            teacher_prompt=other.astype(np.int32),
        )
        results.append(sample)
    return results


SAMPLES = make_samples()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2()).save_pretrained(folder / "student")
    save_family("Llama 3", folder / "teacher", num_hidden_layers=1, hidden_size=96, vocab_size=80)  # with padding
    init_process_group(0, 1, "127.0.0.1", 0)
    yield folder
    dist.destroy_process_group()


def make_step(micro):
    handles = [
        SampleHandle(k, one.group, len(one.tokens), int(one.mask.sum()), 0.0, 0, index=k % 2)
        for k, one in enumerate(SAMPLES)
    ]
    plan = Planner(1, BatchSizes(9, micro, None)).plan(handles).ranks[0]
    return [SAMPLES[k] for k in plan.refs], plan


def make_policy(root, mode, **changes):
    student = FsdpEngine(FsdpSettings(str(root / "student"), schedule=Schedule(1e-2), weight_decay=0.0, **changes))
    teacher = FsdpEngine(FsdpSettings(str(root / "teacher"), trainable=False, role="teacher"))
    return PolicyTrainer(student, AlgorithmSettings("no_rewards", distillation=Distillation(mode)), teacher=teacher)


def run_model(model, prompts):
    """The logits before each token of each response, and the response."""
    for sample, prompt in zip(SAMPLES, prompts, strict=True):
        response = sample.tokens[sample.mask]
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        yield model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float(), torch.from_numpy(response.astype(np.int64))


def reference(root):
    """The log-prob of every token and the mean exact KL, by transformers; the gradient norm of the latter."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(root / name) for name in ("student", "teacher"))
    with torch.no_grad():
        taught = list(run_model(teacher.eval(), [one.teacher_prompt for one in SAMPLES]))
    own = run_model(student, [one.tokens[~one.mask] for one in SAMPLES])
    kls = []
    for (student_logits, _), (teacher_logits, _) in zip(own, taught, strict=True):
        p, q = student_logits.log_softmax(-1), teacher_logits[:, :VOCABULARY].log_softmax(-1)  # without padding
        kls.append((p.exp() * (p - q)).sum(-1))
    kl = torch.cat(kls).mean()
    kl.backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in student.parameters()])
    logprobs = [logits.log_softmax(-1).gather(-1, response[:, None])[:, 0] for logits, response in taught]
    return logprobs, float(kl.detach()), float(norm)


@pytest.mark.parametrize("micro", [1, 4, 6])
def test_log_probs_are_those_of_transformers_on_the_teachers_prompt_and_the_response(root, micro):
    samples, plan = make_step(micro)
    policy = make_policy(root, "reward")
    policy.prepare(samples, plan)
    expected = dict(zip(map(id, SAMPLES), reference(root)[0], strict=True))
    batch = policy._batch
    assert batch.teacher_logprobs is not None
    for index, sample in enumerate(samples):
        part = batch.select([index])
        torch.testing.assert_close(part.teacher_logprobs[part.mask], expected[id(sample)], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("micro", [1, 4, 6])
def test_the_exact_kl_and_its_gradient_are_those_of_transformers(root, micro):
    samples, plan = make_step(micro)
    policy = make_policy(root, "loss")
    metrics = policy.prepare(samples, plan) | policy.update(plan)
    _, kl, norm = reference(root)
    assert metrics["actor/distillation_kl"] == pytest.approx(kl, rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("mode", ["reward", "loss"])
def test_an_adapter_comes_to_the_teacher_and_resumes_without_it_in_the_checkpoint(root, mode, tmp_path):
    samples, plan = make_step(3)
    lora = LoraSettings(4, seed=3)
    policy = make_policy(root, mode, lora=lora)
    for folder, state in policy.states().items():
        save(state, tmp_path / folder)
    assert [folder.name for folder in tmp_path.iterdir()] == ["actor"]
    results = [policy.prepare(samples, plan) | policy.update(plan) for _ in range(4)]
    assert results[-1]["actor/distillation_kl"] < results[0]["actor/distillation_kl"]
    resumed = make_policy(root, mode, lora=lora)
    resumed.load_states({folder: load(state, tmp_path / folder) for folder, state in resumed.states().items()})
    assert [resumed.prepare(samples, plan) | resumed.update(plan) for _ in range(4)] == results
