"""Settings with which SGLang is refused, and what is wrong with an installation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from verl.config.load import load
from verl.config.rollout_engines import get_rollout_engine
from verl.errors import ConfigError
from verl.rollout.engine import make_engine
from verl.rollout.engine_arguments import read_fields
from verl.rollout.isolated.engine import IsolatedEngine
from verl.rollout.sglang import checks
from verl.rollout.sglang.settings import SglangSettings

pytestmark = pytest.mark.unit

R = "actor_rollout_ref.rollout"
K = f"{R}.engine_kwargs.sglang"


def problems(*settings: str) -> list[str]:
    try:
        load([f"{R}.n=8", f"{R}.name=sglang", *settings], complete=False)
    except ConfigError as error:
        return error.problems
    return []


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server arguments of an installed SGLang."""
    names = frozenset({"attention_backend", "enable_dp_attention", "tp_size", "quantization", "nnodes"})
    monkeypatch.setattr(checks, "list_sglang_arguments", lambda: names)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (f"+{K}.tp_size=2", f"{K}.tp_size: has its own setting; set {R}.tensor_model_parallel_size instead"),
        (f"+{K}.quantization=fp8", f"{K}.quantization: is not tested with weight updates"),
        (f"+{K}.skip_tokenizer_init=false", f"{K}.skip_tokenizer_init: is set by verl"),
        (f"+{K}.enable_dp_attention=true", f"{K}.enable_dp_attention: is not supported"),
        (f"+{K}.hicache_storage_backend=file", f"{K}.hicache_storage_backend: keeps the cache of old weights"),
        (f"+{K}.max_queued_requests=64", f"{K}.max_queued_requests: is set by verl"),
        (f"+{K}.atention_backend=fa3", f"did you mean {K}.attention_backend?"),
        (f"{R}.data_parallel_size=2 trainer.device=cuda", f"{R}.data_parallel_size: 2 is not supported with {R}.name"),
        (f"{R}.pipeline_model_parallel_size=2 trainer.device=cuda", f"{R}.pipeline_model_parallel_size: 2 is not"),
        (f"{R}.expert_parallel_size=2 trainer.device=cuda", "over a divisor of the engine's 1 devices"),
        ("trainer.deterministic=true trainer.device=cpu", "sglang does not repeat results to the bit on cpu"),
        ("trainer.deterministic=true trainer.device=cuda", "sglang does not repeat results to the bit on cuda"),
    ],
)
def test_settings_that_sglang_does_not_support_are_refused(setting: str, words: str) -> None:
    found = problems(*setting.split())
    assert [words in each for each in found] == [True]


def test_arguments_of_public_scripts_are_accepted() -> None:
    assert problems(f"+{K}.attention_backend=triton", f"+{K}.enable_dp_attention=False", f"+{K}.nnodes=1") == []


def test_server_arguments_are_read_from_their_source(tmp_path: Path) -> None:
    source = "class Model(Struct):\n    model_path: str\n    dtype: A[str, 'help'] = 'auto'\n    gpu_id = Derived()\n"
    (tmp_path / "model.py").write_text(source)
    assert read_fields(tmp_path / "model.py") == {"model_path", "dtype"}


@pytest.mark.parametrize(("version", "problem"), [("0.5.9", "0.5.9 is too old: 0.5.23"), ("0.6.0rc1", "")])
def test_an_installation_that_is_too_old_is_refused(
    version: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "environment of its own" in checks.find_problem()
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(checks, "version", lambda name: version)
    assert checks.find_problem().startswith(problem)
    assert bool(checks.find_problem()) == bool(problem)


def test_sglang_runs_in_a_process_of_its_own() -> None:
    engine = make_engine(get_rollout_engine("sglang"), SglangSettings("model"))
    assert isinstance(engine, IsolatedEngine)
    assert engine._python == sys.executable
