"""LoRA adapters: which modules get one, what is trained, and the model with its adapter disabled."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny import load_packed, save_peft_adapter, tiny_qwen2
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from verl.checkpoint.adapter import check_base, is_adapter, merge_adapter, original_name, peft_name
from verl.config.adapter_files import read_adapter
from verl.errors import CheckpointError, EngineError
from verl.training.fsdp.lora import describe_adapter, disable_adapter, fingerprint, is_trainable
from verl.training.fsdp.model import PackedModel
from verl.training.settings import Head, LoraSettings

pytestmark = pytest.mark.unit

TOKENS, POSITIONS = torch.arange(9) * 7 % 64, torch.arange(9)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=True)).save_pretrained(folder)
    return folder


def loaded(path: Path, lora: LoraSettings | None, head: Head = "tokens") -> PackedModel:
    return load_packed(str(path), dtype=torch.float32, head=head, lora=lora)


def adapted(model: PackedModel) -> set[str]:
    return {name.partition(".lora_A.")[0] for name, _ in model.hf.named_parameters() if ".lora_A." in name}


def shake(model: PackedModel) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(0.3 * torch.randn_like(parameter))


def test_all_linear_modules_of_the_layers_get_an_adapter_and_the_head_none(path: Path) -> None:
    model = loaded(path, LoraSettings(4))
    assert {name.rpartition(".")[2] for name in adapted(model)} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert len(adapted(model)) == 14
    trained = {name for name, parameter in model.hf.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.hf.named_parameters() if is_trainable(name)}
    assert all(is_adapter(name) for name in trained)


@pytest.mark.parametrize(
    ("targets", "count"),
    [(("q_proj", "v_proj"), 4), (("layers.1.self_attn.q_proj",), 1), (r"layers\.0\..*_proj", 7)],
)
def test_modules_are_named_by_suffixes_or_by_a_pattern(path: Path, targets: str | tuple[str, ...], count: int) -> None:
    assert len(adapted(loaded(path, LoraSettings(2, targets=targets)))) == count


@pytest.mark.parametrize(
    ("targets", "named"),
    [(("q_proj", "qkv"), "qkv"), (("lm_head",), "lm_head"), (("embed_tokens",), "embed_tokens"), ("q_pro", "q_pro")],
)
def test_names_without_a_linear_module_are_refused_with_those_that_have_one(
    path: Path, targets: str | tuple[str, ...], named: str
) -> None:
    available = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    with pytest.raises(
        EngineError, match=f"target_modules: {named} matches no linear module in .* are {available}; set"
    ):
        loaded(path, LoraSettings(2, targets=targets))


def test_an_adapter_is_stored_in_float32_on_weights_of_any_dtype(path: Path) -> None:
    model = load_packed(str(path), dtype=torch.bfloat16, lora=LoraSettings(4))
    kinds = {(is_adapter(name), parameter.dtype) for name, parameter in model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    assert model.forward_packed(TOKENS, POSITIONS, [9]).isfinite().all()


def test_a_critic_trains_its_head_too(path: Path) -> None:
    model = loaded(path, LoraSettings(4), "value")
    others = {n for n, p in model.hf.named_parameters() if p.requires_grad and not is_adapter(n)}
    assert others == {"score.weight", "score.bias"}
    assert len(adapted(model)) == 14


def test_initial_values_depend_on_the_seed_and_nothing_else_changes(path: Path) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, again, other = (loaded(path, LoraSettings(4, seed=seed)) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), state)
    name = "layers.0.self_attn.q_proj.lora_A.default.weight"
    one, two, three = (model.backbone.get_parameter(name) for model in (first, again, other))
    assert torch.equal(one, two)
    assert not torch.equal(one, three)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Qwen2ForCausalLM(tiny_qwen2()),
        lambda: LlamaForCausalLM(
            LlamaConfig(**tiny_qwen2().to_dict() | {"model_type": "llama", "attention_bias": True})
        ),
        lambda: Phi3ForCausalLM(Phi3Config(**tiny_qwen2().to_dict() | {"model_type": "phi3", "pad_token_id": 0})),
    ],
    ids=["qwen2", "llama", "phi3"],
)
@torch.no_grad()
def test_a_model_with_its_adapter_disabled_is_the_model_without_one_to_the_bit(tmp_path: Path, make: object) -> None:
    torch.manual_seed(0)
    hf: PreTrainedModel = make()  # type: ignore[operator]
    hf.save_pretrained(tmp_path)
    plain, model = loaded(tmp_path, None), loaded(tmp_path, LoraSettings(4))
    right = plain.forward_packed(TOKENS, POSITIONS, [9])
    assert torch.equal(model.forward_packed(TOKENS, POSITIONS, [9]), right), "an adapter adds nothing at first"
    shake(model)
    assert not torch.equal(model.forward_packed(TOKENS, POSITIONS, [9]), right)
    with disable_adapter(model):
        assert torch.equal(model.forward_packed(TOKENS, POSITIONS, [9]), right)
    assert not torch.equal(model.forward_packed(TOKENS, POSITIONS, [9]), right)


@torch.no_grad()
def test_merged_weights_compute_what_the_adapter_does(path: Path) -> None:
    model, plain = loaded(path, LoraSettings(4, alpha=12)), loaded(path, None)
    shake(model)
    tensors = dict(model.hf.named_parameters())
    base = ((original_name(name), tensor) for name, tensor in tensors.items() if not is_adapter(name))
    plain.hf.load_state_dict(dict(merge_adapter(base, tensors, 3.0)), strict=False)
    gap = plain.forward_packed(TOKENS, POSITIONS, [9]) - model.forward_packed(TOKENS, POSITIONS, [9])
    assert float(gap.abs().max()) < 1e-5


def test_names_in_files_are_pefts() -> None:
    name = "model.layers.0.mlp.up_proj.lora_B.default.weight"
    assert peft_name(name) == "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    assert original_name("model.layers.0.mlp.up_proj.base_layer.weight") == "model.layers.0.mlp.up_proj.weight"


def test_an_adapter_description_names_its_modules_as_briefly_as_possible(path: Path) -> None:
    subset = LoraSettings(2, targets=("q_proj",))
    one = LoraSettings(2, targets=("layers.1.self_attn.q_proj",))
    assert '"target_modules": ["q_proj"]' in describe_adapter(loaded(path, subset), subset, str(path))["adapter"]
    assert '"model.layers.1.self_attn.q_proj"' in describe_adapter(loaded(path, one), one, str(path))["adapter"]


def test_fingerprints_identify_weights_in_any_folder(path: Path, tmp_path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    names = sorted(weights)
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: weights[name] for name in part}, tmp_path / f"model-{number}.safetensors")
    assert fingerprint(str(tmp_path)) == fingerprint(str(path))
    weights[names[-1]][-1] += 0.5
    save_file({name: weights[name] for name in names[5:]}, tmp_path / "model-1.safetensors")
    assert fingerprint(str(tmp_path)) != fingerprint(str(path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(EngineError, match="no weights in safetensors"):
        fingerprint(str(tmp_path / "empty"))


def test_an_adapter_of_other_weights_or_of_another_size_scale_or_targets_is_refused(path: Path) -> None:
    settings = LoraSettings(2)
    local = describe_adapter(loaded(path, settings), settings, str(path))
    check_base(local, local)
    with pytest.raises(CheckpointError, match="belongs to other weights"):
        check_base(local, local | {"fingerprint": "other"})
    with pytest.raises(CheckpointError, match=re.escape("set peft.lora_alpha=16")):
        check_base(local | {"adapter": local["adapter"].replace('"lora_alpha": 16', '"lora_alpha": 32')}, local)
    fewer = LoraSettings(2, targets=("q_proj",))
    with pytest.raises(CheckpointError, match=re.escape("set peft.target_modules=[down_proj,")):
        check_base(describe_adapter(loaded(path, fewer), fewer, str(path)), local)
    with pytest.raises(CheckpointError, match=re.escape("set peft.lora_rank=2")):
        check_base(describe_adapter(loaded(path, LoraSettings(4)), LoraSettings(4), str(path)), local)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], r".*layers\.1\..*_proj"])
@torch.no_grad()
def test_an_adapter_to_start_from_computes_what_peft_loads(
    path: Path, tmp_path: Path, dtype: torch.dtype, targets: str | list[str]
) -> None:
    save_peft_adapter(path, tmp_path, dtype=dtype, target_modules=targets, lora_alpha=12)
    files = read_adapter(tmp_path, str(path))
    lora = LoraSettings(files.rank, files.alpha, tuple(files.targets), path=str(tmp_path))
    model = loaded(path, lora)
    hf = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = PeftModel.from_pretrained(hf, tmp_path).eval()(TOKENS[None]).logits[0, :-1].log_softmax(-1)
    right = expected.gather(-1, TOKENS[1:, None])[:, 0]
    torch.testing.assert_close(model.forward_packed(TOKENS, POSITIONS, [9])[1:], right, atol=1e-5, rtol=1e-5)
    base = loaded(path, None).forward_packed(TOKENS, POSITIONS, [9])
    assert not torch.allclose(base[1:], right, atol=1e-3), "the adapter changes the model"
    with disable_adapter(model):
        assert torch.equal(model.forward_packed(TOKENS, POSITIONS, [9]), base)
    trained = {name for name, parameter in model.hf.named_parameters() if parameter.requires_grad}
    assert {peft_name(name) for name in trained} == set(load_file(tmp_path / "adapter_model.safetensors"))


def test_an_adapter_with_other_tensors_than_the_settings_ask_for_is_refused(path: Path, tmp_path: Path) -> None:
    save_peft_adapter(path, tmp_path, target_modules=["q_proj", "v_proj"])
    for lora in (LoraSettings(4, targets=("q_proj",)), LoraSettings(4), LoraSettings(2, targets=("q_proj", "v_proj"))):
        with pytest.raises(EngineError, match="remove these settings to use the adapter's"):
            loaded(path, replace(lora, path=str(tmp_path)))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(EngineError, match="cannot be loaded"):
        loaded(path, LoraSettings(4, targets=("q_proj", "v_proj"), path=str(tmp_path)))


def test_without_peft_the_error_states_the_fix(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(EngineError, match=re.escape('pip install -e ".[lora]"')):
        loaded(path, LoraSettings(2))
