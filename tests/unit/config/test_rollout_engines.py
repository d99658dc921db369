"""Rollout engines are known by their registered names and capabilities, and by nothing else."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import verl
from verl.config import rollout_engines
from verl.config.load import load
from verl.config.rollout_engines import (
    PARALLEL_SIZES,
    RolloutCapabilities,
    RolloutEngineSpec,
    get_rollout_engine,
    list_rollout_engines,
    register_rollout_engine,
)
from verl.config.schema.rollout import EngineArguments, RolloutConfig
from verl.errors import ConfigError
from verl.rollout.vllm.settings import LORA_RANKS

pytestmark = pytest.mark.unit

R = "actor_rollout_ref.rollout"
M = "reward.reward_model"
TOY = RolloutEngineSpec(
    name="toy",
    title="Toy",
    engine="toy:Toy",
    capabilities=RolloutCapabilities(settings=frozenset({"max_num_seqs", "engine_kwargs.external"})),
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_engines, "_ENGINES", dict(rollout_engines._ENGINES))
    register_rollout_engine(TOY)


def problems(*settings: str) -> list[str]:
    try:
        load([f"{R}.n=8", *settings], complete=False)
    except ConfigError as error:
        return error.problems
    return []


def hints(*settings: str) -> tuple[str, ...]:
    return load([f"{R}.n=8", *settings], complete=False)[0].hints


def test_an_unknown_engine_is_refused_with_the_closest_name() -> None:
    assert problems(f"{R}.name=vlm") == [f"{R}.name: vlm must be one of vllm, sglang, hf; set {R}.name=vllm"]
    assert problems(f"{M}.rollout.name=toy")[0].startswith(f"{M}.rollout.name: toy must be one of vllm, hf, sglang")


def test_a_reward_model_on_sglang_is_answered_as_not_supported_yet() -> None:
    [problem] = problems(f"{M}.rollout.name=sglang")
    assert problem.startswith(f"{M}.rollout.name: sglang is not supported yet (supported: vllm, hf)")
    assert problems(f"{R}.name=sglang") == []


@pytest.mark.usefixtures("toy")
def test_a_registered_engine_is_accepted_with_the_settings_that_it_supports() -> None:
    assert problems(f"{R}.name=toy", f"{R}.max_num_seqs=8", f"+{R}.engine_kwargs.external.depth=3") == []
    assert hints(f"{R}.name=toy", f"{R}.max_num_seqs=8") == ()
    [hint] = hints(f"{R}.name=toy", f"{R}.enforce_eager=true")
    assert hint == f"{R}.enforce_eager=true has no effect: {R}.name=toy"


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ([f"{R}.quantization=fp8", "trainer.device=cuda"], f"{R}.quantization"),
        ([f"{R}.weight_transport=ipc", "trainer.device=cuda"], f"{R}.weight_transport"),
        (["actor_rollout_ref.actor.peft.lora_rank=8", f"{R}.lora_transport=adapter"], f"{R}.lora_transport"),
        (["actor_rollout_ref.actor.router_replay.mode=R3"], "actor_rollout_ref.actor.router_replay.mode"),
        (["trainer.deterministic=true", "trainer.device=cuda"], f"{R}.name"),
        ([f"{R}.keep_sampling_mask=true", f"{R}.top_k=50"], f"{R}.keep_sampling_mask"),
    ],
)
def test_settings_that_need_more_than_the_engine_supports_are_refused(settings: list[str], key: str) -> None:
    [problem] = problems(f"{R}.name=toy", *settings)
    assert problem.startswith(f"{key}: ")
    assert problems(*settings) == []


@pytest.mark.usefixtures("toy")
def test_only_engines_that_score_run_reward_models() -> None:
    assert problems(f"{M}.rollout.name=toy")[0].startswith(f"{M}.rollout.name: toy must be one of")


@pytest.mark.usefixtures("toy")
def test_a_name_belongs_to_one_engine() -> None:
    register_rollout_engine(TOY)  # a module may be imported twice
    with pytest.raises(ValueError, match="'toy' is registered already"):
        register_rollout_engine(replace(TOY, title="Other"))


def test_another_interpreter_must_exist_and_gets_weights_through_host_memory() -> None:
    required = ("actor_rollout_ref.model.path=m", "data.train_files=p.parquet")
    with pytest.raises(ConfigError, match=rf"{R}\.python: /no/python does not exist .* or set {R}\.python=null"):
        load([f"{R}.n=8", *required, f"{R}.python=/no/python"])
    [problem] = problems(f"{R}.python=/no/python", f"{R}.weight_transport=ipc", "trainer.device=cuda")
    assert problem == (
        f"{R}.weight_transport: ipc does not reach another Python environment ({R}.python); set "
        f"{R}.weight_transport=host"
    )


def test_capabilities_name_settings_that_exist() -> None:
    names = {*RolloutConfig.model_fields, *(f"engine_kwargs.{name}" for name in EngineArguments.model_fields)}
    assert set(PARALLEL_SIZES) <= names
    for name in list_rollout_engines():
        capabilities = get_rollout_engine(name).capabilities
        assert capabilities.accelerator_settings <= capabilities.settings <= names
    assert get_rollout_engine("vllm").capabilities.max_lora_rank == LORA_RANKS[-1]


ALLOWED = {
    "config/rollout_engines.py": "the registry",
    "cluster/environment.py": "names of packages",
    "preflight/cluster.py": "names of packages",
    "preflight/machine.py": "names of packages",
    "redaction/names.py": "the name of a token",
}


def find_engine_names() -> Iterator[str]:
    root = Path(verl.__file__).parent
    for file in root.rglob("*.py"):
        path = file.relative_to(root).as_posix()
        if path in ALLOWED or path.startswith(("rollout/vllm/", "rollout/sglang/")):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and node.value in ("vllm", "sglang", "hf"):
                yield f"{path}:{node.lineno}"


def test_engine_names_are_written_in_the_registry_and_the_folders_of_engines_only() -> None:
    assert list(find_engine_names()) == []


@pytest.mark.usefixtures("toy")
def test_an_engine_is_known_once_its_module_has_been_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine_of_a_module.py").write_text(
        "from verl.config.rollout_engines import RolloutEngineSpec, register_rollout_engine\n"
        "register_rollout_engine(RolloutEngineSpec(name='imported', title='Imported', engine='toy:Toy'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert len(problems(f"{R}.name=imported")) == 1
    assert problems(f"{R}.name=imported", "actor_rollout_ref.model.external_lib=engine_of_a_module") == []
