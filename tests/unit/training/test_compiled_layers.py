"""Compiled layers give the results of plain ones, with one rank and a compiler that generates no code.

`make show-offload` compiles them with the real one.
"""

import pytest
import torch
import torch.distributed as dist
from ranks import free_port
from rotation import rotate_rest
from tiny import save_family, tiny_qwen2
from torch._dynamo.utils import counters
from transformers import Qwen2ForCausalLM

from verl.algorithms.objective import sft
from verl.data.flat_batch import FlatBatch
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.kernels import compilation
from verl.training.process_group import init_process_group
from verl.training.settings import LoraSettings

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    init_process_group(0, 1, "127.0.0.1", free_port())
    folder = tmp_path_factory.mktemp("models")
    save_family("Qwen2", folder / "dense")
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2(num_hidden_layers=1)).save_pretrained(folder / "one-layer")
    save_family("Qwen3-MoE", folder / "moe")
    yield folder
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    with torch._dynamo.config.patch(recompile_limit=8, skip_fsdp_guards=True):
        yield
    torch._dynamo.reset()


def make_batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.ones(int(offsets[-1]), dtype=torch.bool)
    mask[offsets[:-1]] = False
    return FlatBatch(torch.randint(64, mask.shape, generator=generator), offsets, mask)


class Recorder(FsdpEngine):
    def _step(self, lr, *, has_tokens):
        self.gradient = torch.cat([p.grad.full_tensor().flatten() for p in self.model.parameters() if p.requires_grad])
        self.optimizer.zero_grad(set_to_none=True)
        return 1.0, False


def make_engines(folder, kind="dense", **options):
    """Return an engine with plain layers and one with compiled ones."""
    return [Recorder(FsdpSettings(str(folder / kind), compile_layers=on, **options)) for on in (False, True)]


@pytest.mark.parametrize(("backend", "kind"), rotate_rest(3, [("eager", "one-layer"), ("aot_eager", "dense")]))
def test_results_are_those_of_plain_layers_and_new_sizes_need_no_compilation(folder, monkeypatch, backend, kind):
    monkeypatch.setattr(compilation, "BACKEND", backend)
    plain, compiled = make_engines(folder, kind, gradient_checkpointing=True)
    assert compiled.notes == []
    graphs = []
    for step, lengths in enumerate(([5, 9, 9], [3, 12], [30])):
        batches = [make_batch(lengths, step), make_batch(lengths[:1], step), FlatBatch.empty()]
        assert compiled.update(batches, sft) == pytest.approx(plain.update(batches, sft), rel=1e-6)
        torch.testing.assert_close(compiled.gradient, plain.gradient, rtol=1e-5, atol=1e-6)
        for output, expected in zip(compiled.forward(batches), plain.forward(batches), strict=True):
            torch.testing.assert_close(output.logprobs, expected.logprobs)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[-1]


@pytest.mark.rotating(3)
def test_adapters_and_rounding_noise_reach_compiled_layers(folder):
    plain, compiled = make_engines(folder, lora=LoraSettings(4))
    batch, results = make_batch([5, 9, 9]), []
    for engine in (plain, compiled):
        with torch.no_grad():
            for name, parameter in engine.model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
        [adapted], [base] = engine.forward([batch]), engine.without_adapter().forward([batch])
        with engine.rounding_noise("float32"):
            [noisy] = engine.forward([batch])
        results.append([adapted.logprobs, base.logprobs, noisy.logprobs])
    torch.testing.assert_close(*results)
    adapted, base, noisy = results[1]
    assert float((adapted - base).abs().max()) > 1e-2
    assert 0 < float((adapted - noisy).abs().max()) < 1e-2


def test_layers_that_cannot_be_compiled_run_plain_and_a_note_says_why(folder, monkeypatch):
    tries = []

    def fail(graph, inputs):
        tries.append(graph)
        raise FileNotFoundError(2, "g++")

    monkeypatch.setattr(compilation, "BACKEND", fail)
    plain, compiled = make_engines(folder)
    batch = make_batch([5, 9])
    assert compiled.update([batch], sft) == plain.update([batch], sft)
    assert len(tries) == 1
    [note] = compiled.notes
    assert "torch.compile failed, so the layers run uncompiled" in note
    assert "g++" in note
    assert "fsdp_config.use_torch_compile=False" in note


def test_layers_with_experts_are_not_compiled(folder):
    compiled = make_engines(folder, "moe")[1]
    assert compiled.notes == [f"model {folder / 'moe'}: layers with experts are not compiled"]
