"""The warm-up with the real engine, in a separate process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from verl.demo.assets import make_assets
from verl.demo.warmup import warm_up

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("tied", [True, False])
def test_a_warm_up_moves_every_weight_and_nothing_else(tmp_path: Path, tied: bool) -> None:
    assets = make_assets(tmp_path, tied=tied)
    before = load_file(assets.model / "model.safetensors")
    config = (assets.model / "config.json").read_bytes()
    done = warm_up(tmp_path, max_steps=3)
    after = load_file(assets.model / "model.safetensors")
    assert done.steps == 3
    assert 0.0 <= done.accuracy < 0.2
    assert after.keys() == before.keys()
    # biases of keys cancel in the softmax, so only they may stay unchanged
    assert not [name for name in after if "k_proj.bias" not in name and torch.equal(after[name], before[name])]
    assert (assets.model / "config.json").read_bytes() == config
    assert not torch.distributed.is_initialized()
