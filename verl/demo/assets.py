"""Creates the demo's files in seconds, without downloads: a character tokenizer, a tiny model, addition problems.

folder/model/          config.json, model.safetensors, tokenizer.json: a Hugging Face model folder
folder/train.parquet   12+34= -> 046, all problems except the held-out ones
folder/test.parquet    held-out problems: neither a+b nor b+a is in train.parquet
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from verl.demo.folder import Assets

_HELD_OUT = 512


def make_assets(folder: str | Path, *, seed: int = 0, tied: bool = True) -> Assets:
    """Write the tokenizer, the randomly initialized model and the data, deterministically for a seed."""
    assets = Assets(Path(folder))
    assets.model.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(assets.model)
    model = make_model(tokenizer, seed=seed, tied=tied)
    model.config.save_pretrained(assets.model)
    model.generation_config.save_pretrained(assets.model)
    write_weights(assets.model, model.named_parameters())
    train, test = split_problems(seed=seed)
    _write_problems(assets.train, train, "train")
    _write_problems(assets.test, test, "test")
    return assets


def make_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with one token per byte.

    It has the tokenizer class of the model's family, without merges: transformers would silently replace any other
    class in the folder of a Qwen2 model.
    """
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<eos>",  # never used: every byte has a token
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )


def make_model(tokenizer: Qwen2Tokenizer, *, seed: int = 0, tied: bool = True) -> Qwen2ForCausalLM:
    """Return a randomly initialized Qwen2 with 0.6 million float32 parameters."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,  # head size 64: vLLM's attention on the CPU needs at least 32
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.08,  # the model is narrow: 1 / sqrt(hidden size)
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.config.architectures = [type(model).__name__]  # otherwise set only by `save_pretrained` of the model
    return model


def split_problems(*, seed: int = 0) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (train, held-out) pairs of two-digit numbers. A pair and its mirror image are in the same split."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    shuffle = random.Random(seed).shuffle
    shuffle(pairs)
    both = [{pair, pair[::-1]} for pair in pairs]
    cut = _HELD_OUT // 2
    test = [problem for mirror in both[:cut] for problem in sorted(mirror)]
    train = [problem for mirror in both[cut:] for problem in sorted(mirror)]
    shuffle(train)
    shuffle(test)
    return train, test


def read_problems(path: Path) -> list[tuple[str, str]]:
    rows = pq.read_table(path, columns=["prompt", "reward_model"]).to_pylist()
    return [(row["prompt"], row["reward_model"]["ground_truth"]) for row in rows]


def write_weights(model: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Atomically replace the weights of a Hugging Face model folder."""
    temporary = model / "model.safetensors.tmp"
    tensors = {name: tensor.detach().contiguous() for name, tensor in weights}
    save_file(tensors, temporary, metadata={"format": "pt"})
    os.replace(temporary, model / "model.safetensors")


def _write_problems(path: Path, problems: list[tuple[int, int]], split: str) -> None:
    """Write problems in the usual layout of verl data files, with string prompts."""
    rows = [
        {
            "data_source": "addition",
            "prompt": f"{a}+{b}=",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": f"{a + b:03d}"},
            "extra_info": {"split": split, "index": index},
        }
        for index, (a, b) in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
