"""Custom loops around `RolloutWorker` and `TrainerWorker`, in one process, with transformers as the engine."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
import transformers
from rotation import rotate_rest
from tiny import chat_tokenizer, tiny_family

from verl.config.rollout_engines import get_rollout_engine
from verl.errors import ConfigError, DataError, EngineError, RewardError
from verl.workers import RolloutWorker, TrainerWorker
from verl.workers.in_process import resolve_engine_device

pytestmark = pytest.mark.contract

PROMPTS = ["1+1=", "2+2="]


def model_of(family: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(tiny_family(family, vocab_size=127))


def rollouts_of(model: transformers.PreTrainedModel, **more: Any) -> RolloutWorker:
    scores = itertools.count()  # never two of a kind, so that every group has something to learn, whatever is drawn

    def reward(response: str, **others: Any) -> float:
        return float(next(scores))

    return RolloutWorker(
        model, "hf", tokenizer=chat_tokenizer(), **{"reward": reward, "n": 4, "max_new_tokens": 4, **more}
    )


@pytest.fixture(params=rotate_rest(5, ["Qwen2", "Qwen3-MoE"]))
def model(request: pytest.FixtureRequest) -> transformers.PreTrainedModel:
    return model_of(request.param)


def test_a_step_changes_the_model_and_the_next_answers_are_of_the_new_weights(
    model: transformers.PreTrainedModel,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with closing(rollouts_of(model)) as rollouts, closing(TrainerWorker(model, optimizer)) as trainer:
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        metrics = trainer.train_step(rollouts.generate(PROMPTS))
        assert metrics["actor/lr"] == 1e-2
        same = [name for name, parameter in model.named_parameters() if torch.equal(before[name], parameter)]
        assert not [name for name in same if not name.endswith("bias")], "all matrices are trained, and taken over"
        optimizer.param_groups[0]["lr"] = 5e-3  # as a scheduler would
        answers = rollouts.generate(PROMPTS)
        assert {version for answer in answers for version in answer.sample.versions[answer.sample.mask]} == {1}
        assert trainer.train_step(answers)["actor/lr"] == 5e-3


@pytest.fixture
def rollouts() -> Iterator[RolloutWorker]:
    with closing(rollouts_of(model_of("Qwen2"))) as made:
        yield made


def test_weights_are_known_by_their_content_however_they_were_written(rollouts: RolloutWorker) -> None:
    def version() -> set[int]:
        answers = rollouts.generate(PROMPTS[:1])
        return {int(version) for answer in answers for version in answer.sample.versions[answer.sample.mask]}

    first = next(rollouts.model.parameters())
    assert version() == version() == {0}
    first.data.add_(1.0)  # torch's own counter does not see this
    assert version() == {1}
    first.data.sub_(0.0)
    assert version() == {1}, "they are the same"


def test_answers_of_two_workers_are_not_taken_for_those_of_one_prompt(rollouts: RolloutWorker) -> None:
    with closing(rollouts_of(rollouts.model)) as others:
        groups = [answer.sample.group for one in (rollouts, others) for answer in one.generate(PROMPTS[:1])]
    assert len(set(groups)) == 2


def test_what_is_given_is_answered_and_not_its_letters_or_columns(rollouts: RolloutWorker) -> None:
    for given in ("Hello", {"prompt": ["Hello"], "level": [1]}):
        assert [answer.prompt for answer in rollouts.generate(given)] == ["Hello"] * 4
    with pytest.raises(DataError, match="is a dict with question"):
        rollouts.generate([{"question": "Hello"}])


def test_answers_of_another_temperature_are_refused(rollouts: RolloutWorker) -> None:
    with (
        closing(TrainerWorker(rollouts.model, temperature=0.7)) as trainer,
        pytest.raises(ConfigError, match=r"sampled at 1.0 but are trained at 0.7"),
    ):
        trainer.train_step(rollouts.generate(PROMPTS))


def test_a_reward_that_cannot_be_called_is_told_before_an_engine_is_started() -> None:
    with pytest.raises(RewardError, match="answer"):
        rollouts_of(model_of("Qwen2"), reward=lambda answer: 1.0)


def test_a_wrong_argument_leaves_nothing_behind_and_a_second_trainer_is_told_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("Qwen2")
    with pytest.raises(ConfigError, match=r"optimizer: SGD must be an AdamW"):
        TrainerWorker(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(ConfigError, match=r"estimator: 'grop' is not one of"):
        TrainerWorker(model, estimator="grop")
    with monkeypatch.context() as patched:
        patched.setattr(model, "save_pretrained", raising(OSError("disk is full")))
        with pytest.raises(OSError, match="disk"):
            TrainerWorker(model)
    first = TrainerWorker(model)
    with pytest.raises(EngineError, match=r"close\(\) the other TrainerWorker"):
        TrainerWorker(model)
    first.close()
    with closing(TrainerWorker(model)):
        first.close()  # once more: the group is another's by now
        assert torch.distributed.is_initialized()
    with pytest.raises(EngineError, match="this TrainerWorker is closed"):
        first.train_step([])


def raising(error: Exception) -> Any:
    def raises(*_: Any, **__: Any) -> None:
        raise error

    return raises


def test_a_closed_worker_says_so() -> None:
    rollouts = rollouts_of(model_of("Qwen2"))
    rollouts.close()
    with pytest.raises(EngineError, match="this RolloutWorker is closed"):
        rollouts.generate(PROMPTS)


def test_without_a_reward_it_is_said_before_anything_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(rollouts_of(model_of("Qwen2"), reward=None)) as rollouts:
        assert rollouts.generate([{"prompt": "1+1=", "data_source": "addition", "ground_truth": "2"}])
        monkeypatch.setattr(rollouts._engine, "generate", raising(AssertionError("it was asked for an answer")))
        with pytest.raises(RewardError, match=r"prompts\[0\]: nothing can score its responses.*reward=my_function"):
            rollouts.generate(PROMPTS)


def test_an_engine_that_there_is_not_and_a_device_that_it_cannot_take_are_named_by_their_arguments() -> None:
    with pytest.raises(ConfigError, match=r"inference_engine: 'trtllm' is not an engine; use vllm or sglang or hf"):
        RolloutWorker(model_of("Qwen2"), "trtllm", tokenizer=chat_tokenizer())
    with pytest.raises(ConfigError, match=r"device='cuda:1': vLLM takes the first visible GPU.*CUDA_VISIBLE_DEVICES=1"):
        resolve_engine_device(get_rollout_engine("vllm"), "cuda:1")
    assert [resolve_engine_device(get_rollout_engine("vllm"), one) for one in ("cuda", "cuda:0", "cpu")] == [
        "cuda",
        "cuda",
        "cpu",
    ]
    assert resolve_engine_device(get_rollout_engine("hf"), "cuda:1") == "cuda:1"


def test_the_users_optimizer_has_the_moments_and_a_resumed_one_goes_on_with_them(rollouts: RolloutWorker) -> None:
    def stepped(state: dict[str, Any] | None, steps: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if state is not None:
            optimizer.load_state_dict(copy.deepcopy(state))
        with closing(TrainerWorker(model, optimizer)) as trainer:
            for _ in range(steps):
                trainer.train_step(answers)
        return [each.detach().clone() for each in model.parameters()], copy.deepcopy(optimizer.state_dict())

    model = rollouts.model
    answers, first = rollouts.generate(PROMPTS), copy.deepcopy(model.state_dict())
    through, _ = stepped(None, 2)
    model.load_state_dict(first)
    _, saved = stepped(None, 1)
    assert {int(each["step"]) for each in saved["state"].values()} == {1}
    assert any(each["exp_avg"].any() for each in saved["state"].values())
    resumed, _ = stepped(saved, 1)
    assert all(torch.equal(a, b) for a, b in zip(through, resumed, strict=True))


def test_how_the_model_is_trained_is_as_the_model_says() -> None:
    model = model_of("Qwen2").to(torch.bfloat16)
    model.gradient_checkpointing_enable()
    with closing(TrainerWorker(model)) as trainer:
        settings = trainer._engine.settings
    assert (settings.compute_dtype, settings.gradient_checkpointing) == ("bfloat16", True)
    other = torch.optim.AdamW(list(model.parameters())[:2])
    with pytest.raises(ConfigError, match=r"optimizer: must have the \d+ parameters of the model"):
        TrainerWorker(model, other)
    assert not torch.distributed.is_initialized()
