"""The engines of transformers compute what a model defines, also where transformers' own attention would not."""

from pathlib import Path

import pytest
import torch
from tiny import FAMILIES, WINDOW, load_packed, save_family, tiny_family
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from verl.models.model_support import making_model
from verl.rewards.models.hf import HfRewardModel
from verl.rewards.settings import RewardModelSettings
from verl.rollout.engine import load_weights
from verl.rollout.hf import HfEngine
from verl.rollout.settings import RolloutEngineSettings
from verl.weights.bucket import pack, to_hf

pytestmark = pytest.mark.unit

TOKENS = [number * 7 % 61 for number in range(WINDOW + 8)]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_log_probs_are_those_of_the_models_own_attention(tmp_path: Path, family: str, load_format: str) -> None:
    path = save_family(family, tmp_path)
    own = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logprobs = own(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    engine = HfEngine(RolloutEngineSettings(path, load_format=load_format))
    await engine.start()
    if load_format == "dummy":
        weights = to_hf(own, ((name, each.detach()) for name, each in own.named_parameters()))
        await load_weights(engine, list(pack(weights, max_bytes=1 << 20)), 0)
    logprobs_of_engine = torch.tensor((await engine.compute_logprobs([TOKENS]))[0])
    expected = logprobs[:-1].gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    assert torch.allclose(logprobs_of_engine, expected, atol=1e-4)


async def test_a_reward_model_scores_by_its_own_attention(tmp_path: Path) -> None:
    torch.manual_seed(0)
    own = AutoModelForSequenceClassification.from_config(
        tiny_family("Gemma 2", num_labels=1), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        [[expected]] = own(torch.tensor([TOKENS])).logits.tolist()
    own.save_pretrained(tmp_path)
    model = HfRewardModel(RewardModelSettings("", str(tmp_path), batch=4, deadline_s=60))
    await model.start()
    [score] = await model.score([TOKENS])
    await model.close()
    assert score == pytest.approx(expected, abs=1e-4)


async def test_one_model_is_made_at_a_time_because_torch_has_one_default_data_type_for_all_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model = AutoModelForSequenceClassification.from_config(tiny_family("Gemma 2", num_labels=1))
    tiny_model.save_pretrained(tmp_path / "rewards")
    path = save_family("Qwen2", tmp_path / "policy")
    was_alone: list[bool] = []
    monkeypatch.setattr(torch, "set_default_dtype", lambda dtype: was_alone.append(making_model.locked()))
    model = HfRewardModel(RewardModelSettings("", str(tmp_path / "rewards"), batch=4, deadline_s=60))
    for make in (model.start, HfEngine(RolloutEngineSettings(path, load_format="auto")).start):
        await make()
        assert was_alone, "transformers sets the data type in another way"
        assert all(was_alone)
        was_alone.clear()
    load_packed(path)
    assert was_alone
    assert all(was_alone)
    await model.close()
