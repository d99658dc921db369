"""The contract of every registered training engine on several ranks: the same results as on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import free_port, run_ranks
from tiny import tiny_qwen2
from transformers import Qwen2ForCausalLM

import tests.toy_train_engine  # noqa: F401 - registers the engine `toy`
from verl.algorithms.objective import sft
from verl.checkpoint.save import load, save
from verl.config.train_engines import list_train_engines
from verl.data.flat_batch import FlatBatch
from verl.training.process_group import init_process_group
from verl.training.registry import build_engine, get_settings_class
from verl.training.settings import Schedule

pytestmark = pytest.mark.distributed

SIZES = [7, 3, 9, 5]


def batch_of(data_rank: int, data_size: int) -> FlatBatch:
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(64, (size,), generator=generator) for size in SIZES][data_rank::data_size]
    lengths = [len(each) for each in sequences]
    tokens, offsets = torch.cat(sequences), torch.tensor([0, *lengths]).cumsum(0)
    batch = FlatBatch(tokens, offsets, torch.ones(len(tokens), dtype=torch.bool))
    return batch.with_(mask=batch.positions > 0)


def train(rank: int, world: int, port: int, name: str, root: Path) -> None:
    if name == "megatron":
        import tests.megatron_on_cpu  # noqa: F401 - in a process of its own
    init_process_group(rank, world, "127.0.0.1", port)
    settings = get_settings_class(name)(str(root / "model"), schedule=Schedule(1e-2))
    engine = build_engine(settings)
    batches = [batch_of(engine.data_rank, engine.layout.data_size)]
    metrics = [engine.update(batches, sft) for _ in range(2)]
    gathered = engine.gather(torch.tensor([[float(engine.data_rank)]]))
    save(engine.state(), root / f"checkpoint{world}")
    again = build_engine(settings)
    again.load_state(load(again.state(), root / "checkpoint2"))  # which two ranks have written
    metrics.append(again.update(batches, sft))
    weights = {weight: tensor.clone() for weight, tensor in again.weights()}
    if rank == 0:
        torch.save((metrics, gathered, weights), root / f"results{world}")


@pytest.mark.parametrize("name", list_train_engines(supporting="many_ranks"))
def test_two_ranks_train_save_and_resume_as_one_does(name: str, tmp_path: Path) -> None:
    if name == "megatron":
        pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2(vocab_size=64)).save_pretrained(tmp_path / "model")
    for world in (2, 1):  # one rank resumes from the checkpoint of two
        run_ranks(train, world, world, free_port(), name, tmp_path, deadline_s=240)
    (many, gathered, weights), (one, _, expected) = (torch.load(tmp_path / f"results{world}") for world in (2, 1))
    assert gathered.tolist() == [[0.0], [1.0]]
    for some, other in zip(many, one, strict=True):
        assert some == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert weights.keys() == expected.keys()
    for key, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-5, rtol=1e-4)
