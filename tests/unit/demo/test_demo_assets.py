"""The demo's files: offline, the same for the same seed, and readable by the libraries that users have."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.demo.assets import (
    Assets,
    make_assets,
    make_model,
    make_tokenizer,
    read_problems,
    split_problems,
    write_weights,
)
from verl.demo.warmup import encode, generate_greedy, measure_accuracy
from verl.rewards.reward_function import load_reward
from verl.sft.examples import pair_example

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return make_assets(tmp_path_factory.mktemp("demo"))


def test_no_held_out_problem_or_its_mirror_image_is_trained_on() -> None:
    train, test = split_problems(seed=3)
    assert len(test) > 400
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in test}
    assert sorted(train + test) == [(a, b) for a in range(10, 100) for b in range(10, 100)]


def test_every_row_has_what_training_and_scoring_ask_for(assets: Assets) -> None:
    for file, split in ((assets.train, "train"), (assets.test, "test")):
        row = pq.read_table(file).to_pylist()[5]
        a, b = row["prompt"].rstrip("=").split("+")
        assert row["data_source"] == "addition"
        assert row["reward_model"] == {"style": "rule", "ground_truth": f"{int(a) + int(b):03d}"}
        assert row["extra_info"] == {"split": split, "index": 5}


async def test_the_shipped_scorer_judges_the_demos_answers(assets: Assets) -> None:
    reward = load_reward(None)
    _, truth = read_problems(assets.test)[0]
    assert (await reward.score("addition", truth, truth))[0] == 1.0
    assert (await reward.score("addition", truth[::-1] + "1", truth))[0] == 0.0


def test_the_tokenizer_is_one_token_a_character_and_comes_back_from_disk(assets: Assets) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    text = "12+34= It's 046,\nno?"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert ids == make_tokenizer().encode(text)
    assert tokenizer.decode(tokenizer.encode("né ✓")) == "né ✓"
    assert tokenizer.decode([*tokenizer.encode("046"), tokenizer.eos_token_id], skip_special_tokens=True) == "046"
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+2="}], tokenize=False) == "1+2="


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_is_small_and_comes_back_from_disk_as_it_was(tmp_path: Path, tied: bool) -> None:
    assets = make_assets(tmp_path, tied=tied)
    loaded = AutoModelForCausalLM.from_pretrained(assets.model)
    made = make_model(make_tokenizer(), tied=tied)
    assert 6e5 < sum(parameter.numel() for parameter in loaded.parameters()) < 7e5
    assert loaded.config.tie_word_embeddings is tied
    assert loaded.config.architectures == ["Qwen2ForCausalLM"]
    tokens = torch.arange(10)[None]
    assert torch.equal(loaded(tokens).logits, made(tokens).logits)


def test_a_seed_decides_everything(tmp_path: Path) -> None:
    one, same, other = (make_assets(tmp_path / str(n), seed=seed) for n, seed in enumerate((7, 7, 8)))
    for name in ("model/model.safetensors", "train.parquet", "test.parquet"):
        assert (one.folder / name).read_bytes() == (same.folder / name).read_bytes()
        assert (one.folder / name).read_bytes() != (other.folder / name).read_bytes()


def test_making_the_model_leaves_the_random_state_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    make_model(make_tokenizer(), seed=5)
    assert torch.equal(torch.rand(1), expected)


def test_weights_are_replaced_and_the_config_stays(tmp_path: Path) -> None:
    assets = make_assets(tmp_path)
    before = (assets.model / "config.json").read_bytes()
    write_weights(assets.model, make_model(make_tokenizer(), seed=9).named_parameters())
    loaded = AutoModelForCausalLM.from_pretrained(assets.model)
    assert torch.equal(
        loaded.get_input_embeddings().weight, make_model(make_tokenizer(), seed=9).get_input_embeddings().weight
    )
    assert (assets.model / "config.json").read_bytes() == before
    assert not list(assets.model.glob("*.tmp"))


def test_greedy_answers_are_those_of_transformers(assets: Assets) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    model = AutoModelForCausalLM.from_pretrained(assets.model)
    prompts = encode(tokenizer, read_problems(assets.test)[:8])[:, :-4]
    expected = model.generate(prompts, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)[:, 6:]
    assert torch.equal(generate_greedy(model, prompts), expected)


def test_accuracy_counts_whole_answers() -> None:
    model = make_model(make_tokenizer())
    prompts = torch.randint(3, 13, (4, 6))
    rows = torch.cat([prompts, generate_greedy(model, prompts)], dim=1)
    assert measure_accuracy(model, rows) == 1.0
    rows[0, -1] += 1
    assert measure_accuracy(model, rows) == 0.75


def test_an_example_of_the_warm_up_is_what_is_judged_and_trains_on_the_answer_alone() -> None:
    tokenizer = make_tokenizer()
    example = pair_example(tokenizer, "12+34=", "046", [tokenizer.eos_token_id])
    assert example.tokens.tolist() == encode(tokenizer, [("12+34=", "046")])[0].tolist()
    assert tokenizer.decode(example.tokens[example.mask]) == "046<eos>"
