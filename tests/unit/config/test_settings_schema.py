"""`verl config --schema`: editors accept what a run accepts, and mark what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from omegaconf import OmegaConf

from verl.cli import main
from verl.config.json_schema import build_schema
from verl.config.load import RUN_TYPES, SFT, TRAIN, AnyRunType
from verl.config.paths import set_path
from verl.config.schema import collect_settings

pytestmark = pytest.mark.unit

OTHERS = ("kubernetes", "monitoring", "skypilot")  # folders whose files are for other programs
EXAMPLES = sorted(
    path for path in Path(__file__).parents[3].glob("examples/**/*.yaml") if path.parent.name not in OTHERS
)
SCHEMAS = {run_type.command: Draft7Validator(build_schema(run_type)) for run_type in RUN_TYPES}


def errors(settings: Any, run_type: AnyRunType = TRAIN) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in SCHEMAS[run_type.command].iter_errors(settings)]


@pytest.mark.parametrize("run_type", RUN_TYPES, ids=lambda run_type: run_type.command)
def test_the_schema_is_valid_and_accepts_all_defaults(run_type: AnyRunType) -> None:
    Draft7Validator.check_schema(SCHEMAS[run_type.command].schema)
    assert errors(run_type.root().model_dump(mode="json"), run_type) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_examples_are_valid(path: Path) -> None:
    run_type = SFT if "sft" in path.stem else TRAIN
    assert errors(OmegaConf.to_container(OmegaConf.load(path)), run_type) == []


def test_there_are_examples_of_both_commands() -> None:
    assert sum("sft" in path.stem for path in EXAMPLES) >= 2
    assert len(EXAMPLES) >= 30


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("trainer: {total_epoch: 3}", "$.trainer: "),
        ("trainer: {nnodes: two}", "$.trainer.nnodes: "),
        ("trainer: {nnodes: 0}", "$.trainer.nnodes: "),
        ("trainer: {save_freq: 0}", "$.trainer.save_freq: "),
        ("trainer: {logger: [console, wandbb]}", "$.trainer.logger: "),
        ("trainer: {resume_mode: never}", "$.trainer.resume_mode: "),
        ("actor_rollout_ref: {rollout: {name: trtllm}}", "$.actor_rollout_ref.rollout.name: "),
        ("rollout: {nn: 8}", "$.rollout: "),
        ("algorithm: {adv_estimator: my function}", "$.algorithm.adv_estimator: "),
        ("actor_rollout_ref: {actor: {optim: {betas: [0.9]}}}", "$.actor_rollout_ref.actor.optim.betas: "),
        ("algoritm: {adv_estimator: grpo}", "$: "),
    ],
)
def test_what_a_run_refuses_is_marked_at_its_place(text: str, place: str) -> None:
    found = errors(OmegaConf.to_container(OmegaConf.create(text)))
    assert [error for error in found if error.startswith(place)] == found != []


@pytest.mark.parametrize(
    "text",
    [
        "trainer: {logger: wandb, nnodes: 2, save_freq: -1, max_hours: null, experiment_name: 7}",
        "data: {train_files: '???', seed: '${trainer.seed}'}",
        "rollout: {n: 8, engine_kwargs: {vllm: {anything: [1, {a: b}]}}}",
        "ray_kwargs: {ray_init: {num_cpus: 4, undeclared: 1}}",
        "algorithm: {adv_estimator: 'mine.estimators:best', rollout_correction: {rollout_rs: 'token, k2'}}",
        "actor_rollout_ref: {actor: {fsdp_config: {dtype: bf16}, optim: {lr_warmup_steps: -1}}}",
        "critic:",
    ],
)
def test_what_a_run_accepts_is_accepted(text: str) -> None:
    assert errors(OmegaConf.to_container(OmegaConf.create(text))) == []


@pytest.mark.parametrize("run_type", RUN_TYPES, ids=lambda run_type: run_type.command)
def test_aliases_are_accepted_for_the_values_of_their_settings(run_type: AnyRunType) -> None:
    settings = collect_settings(run_type.root)
    for alias, key in run_type.legacy.aliases.items():
        if (setting := settings.get(key)) is None or setting.section is not None or setting.required:
            continue
        tree: dict[str, Any] = {}
        set_path(tree, tuple(alias.split(".")), setting.default)
        assert errors(tree, run_type) == [], alias
    assert errors({"trainer": {"nnode": "two"}}) != []


def test_every_setting_has_its_documentation_and_default() -> None:
    schema = SCHEMAS["train"].schema
    for setting in collect_settings(TRAIN.root).values():
        node = schema
        for name in setting.path:
            node = node["properties"][name]
        assert setting.doc.removesuffix(".") in node["description"], setting.key
        assert setting.section or setting.required or "default" in node, setting.key


def test_config_schema_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == build_schema(TRAIN)
    assert main(["config", "--schema", "--sft"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Settings of verl sft"
    assert main(["config", "--schema", "trainer.seed=1"]) == 2
    assert "remove trainer.seed=1" in capsys.readouterr().err
