"""One suite for every reward model: the fake, and those that transformers and vLLM run."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio
import torch
from tiny import tiny_qwen2
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from tests.fake_reward_model import FakeRewardModel
from verl.errors import ConfigError
from verl.rewards.models.hf import HfRewardModel
from verl.rewards.models.interface import RewardModel
from verl.rewards.settings import RewardModelSettings
from verl.rollout.vllm.reward_model import VllmRewardModel

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

PADDING, END, LONGEST = 0, 1, 48
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_labels": 1,
    "initializer_range": 0.2,
}


def qwen2(**changes: Any) -> Any:
    config = tiny_qwen2(num_labels=1, initializer_range=0.2, max_position_embeddings=LONGEST, **changes)
    return Qwen2ForSequenceClassification(config)


MODELS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: qwen2(pad_token_id=PADDING),
    "qwen2 whose end token pads": lambda: qwen2(pad_token_id=END),
    "llama without padding": lambda: LlamaForSequenceClassification(
        LlamaConfig(**SIZES, max_position_embeddings=LONGEST, pad_token_id=None)
    ),
    "bert": lambda: BertForSequenceClassification(
        BertConfig(**SIZES, max_position_embeddings=LONGEST, pad_token_id=PADDING)
    ),
    "roberta": lambda: RobertaForSequenceClassification(
        RobertaConfig(**SIZES, max_position_embeddings=LONGEST + 2, pad_token_id=1)
    ),
}


def reward_model_settings(path: Path | str) -> RewardModelSettings:
    return RewardModelSettings("", str(path), batch=16, deadline_s=60)


CAUSAL = ("qwen2 whose end token pads",)
MAKERS: dict[str, Callable[[str], RewardModel]] = {
    "fake": lambda path: FakeRewardModel(limit=LONGEST),
    "hf": lambda path: HfRewardModel(reward_model_settings(path)),
    "vllm": lambda path: VllmRewardModel(reward_model_settings(path)),
}


def saved(folder: Path, make: Callable[[], Any]) -> Path:
    torch.manual_seed(0)
    make().save_pretrained(folder)
    return folder


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["fake", *(f"hf: {name}" for name in MODELS), *(f"vllm: {name}" for name in CAUSAL)],
)
async def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[RewardModel, Path | None]]:
    engine, _, name = request.param.partition(": ")
    path = saved(tmp_path_factory.mktemp("model"), MODELS[name]) if name else None
    model = MAKERS[engine](str(path))
    await model.start()
    yield model, path
    await model.close()


@pytest.fixture
def model(made: tuple[RewardModel, Path | None]) -> RewardModel:
    return made[0]


def conversations(count: int, seed: int = 0) -> list[list[int]]:
    """Of all lengths; some end with the end token, some hold it, and the token that pads, in the middle."""
    random = Random(seed)
    conversations = [[random.randrange(2, 64) for _ in range(random.randint(1, LONGEST - 3))] for _ in range(count)]
    return [
        [*tokens, *[(), (END,), (PADDING, 5), (END, 7, END)][index % 4]] for index, tokens in enumerate(conversations)
    ]


async def test_a_score_does_not_depend_on_what_else_is_in_the_batch(model: RewardModel) -> None:
    batch = conversations(12)
    together = await model.score(batch)
    alone = [(await model.score([tokens]))[0] for tokens in batch]
    assert together == pytest.approx(alone, abs=1e-5)
    assert await model.score(batch[::-1]) == pytest.approx(together[::-1], abs=1e-5)
    assert len(set(together)) == len(together), "scores differ between conversations"


async def test_a_score_is_the_one_that_transformers_gives_to_the_conversation_alone(
    made: tuple[RewardModel, Path | None],
) -> None:
    model, path = made
    if path is None:
        pytest.skip("the fake has no model")
    own = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    batch = conversations(8, seed=1)
    with torch.no_grad():
        expected = [float(own(torch.tensor([tokens])).logits[0, 0]) for tokens in batch]
    assert await model.score(batch) == pytest.approx(expected, abs=1e-4)


async def test_the_last_token_counts_unless_it_pads(made: tuple[RewardModel, Path | None]) -> None:
    """A causal model that pads with its end token was trained to read the token before it."""
    model, path = made
    if path is None or "bert" in path.joinpath("config.json").read_text().lower():
        pytest.skip("it reads the whole conversation, and not the last token")
    pads = AutoModelForSequenceClassification.from_pretrained(path).config.pad_token_id
    [open_, ended] = await model.score([[5, 6, 7], [5, 6, 7, END]])
    assert (open_ == pytest.approx(ended, abs=1e-5)) == (pads == END)


async def test_as_many_tokens_as_the_model_reads_and_no_more(model: RewardModel) -> None:
    longest = [7] * LONGEST
    assert model.check_input(longest) is None
    assert len(await model.score([longest])) == 1
    assert f"{LONGEST + 1} tokens, more than the {LONGEST} that the model supports" in str(
        model.check_input([*longest, 7])
    )


async def test_tokens_that_the_model_does_not_know_are_refused(model: RewardModel) -> None:
    assert model.check_input([63]) is None
    assert "token 64" in str(model.check_input([5, 64]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Qwen2ForCausalLM(tiny_qwen2()), ["Qwen2ForCausalLM", "verl.rewards.judge"]),
        (lambda: Qwen2ForSequenceClassification(tiny_qwen2(num_labels=3)), ["3 labels", "num_labels: 1"]),
    ],
)
async def test_a_model_that_cannot_be_a_reward_is_rejected_with_the_fix(
    make: Callable[[], Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        await HfRewardModel(reward_model_settings(saved(tmp_path, make))).start()
    for word in ("reward.reward_model.model_path", *words):
        assert word in str(refused.value)


@pytest.mark.parametrize("engine", ["hf", "vllm"])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
async def test_a_head_that_the_engine_would_make_up_is_refused(engine: str, shard: str, tmp_path: Path) -> None:
    config = tiny_qwen2(num_labels=1, pad_token_id=PADDING)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path, max_shard_size=shard)
    config.architectures = ["Qwen2ForSequenceClassification"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has no weights score\.weight"):
        await MAKERS[engine](str(tmp_path)).start()


async def test_vllm_leaves_to_transformers_what_does_not_read_the_last_token(tmp_path: Path) -> None:
    path = str(saved(tmp_path, MODELS["bert"]))
    with pytest.raises(ConfigError, match=r"BertForSequenceClassification.*set reward\.reward_model\.rollout\.name=hf"):
        await VllmRewardModel(reward_model_settings(path)).start()


async def test_a_path_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.reward_model\.model_path=.*no model found"):
        await HfRewardModel(reward_model_settings(tmp_path)).start()
