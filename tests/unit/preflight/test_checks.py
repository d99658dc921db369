"""What the checks before a run find in settings, files and on the machine; no engine and no process is started."""

from __future__ import annotations

import json
import shutil
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file
from tiny import chat_tokenizer, tiny_qwen2

from verl.cli import main
from verl.config.load import TRAIN, inspect_run, load
from verl.config.schema import Config
from verl.data.files import READ_AT_ONCE
from verl.data.inspection import DataInspector
from verl.preflight import machine
from verl.preflight.files import count_kept_checkpoints, find_folder_findings, find_model_findings
from verl.preflight.finding import Report, Severity
from verl.preflight.machine import find_device_findings, find_port_findings, find_version_findings
from verl.preflight.prompts import FirstRows, check_prompts, find_length_findings
from verl.preflight.run_checks import check_run
from verl.preflight.settings import check_settings

pytestmark = pytest.mark.unit

SIZES = (
    *("rollout.n=4", "trainer.n_gpus_per_node=1", "data.train_batch_size=8", "actor.ppo_mini_batch_size=8"),
    *("data.max_prompt_length=64", "data.max_response_length=64", "rollout.name=hf"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and 32 prompts for it."""
    monkeypatch.chdir(tmp_path)
    chat_tokenizer().save_pretrained("model")
    tiny_qwen2().save_pretrained("model")
    save_file({"model.norm.weight": np.zeros(4, np.float32)}, "model/model.safetensors")
    write_rows("train.parquet", [make_row(f"{index}+1=") for index in range(32)])
    return tmp_path


def make_row(text: str, **columns: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": text}]
    return {"prompt": prompt, "data_source": "addition", "reward_model": {"ground_truth": "2"}} | columns


def write_rows(name: str, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), name)


def make_config(*settings: str) -> Config:
    given = ("data.train_files=train.parquet", "model.path=model", *SIZES, *settings)
    return load(list({setting.partition("=")[0]: setting for setting in given}.values()))[0].config


def test_settings_are_returned_with_all_that_is_wrong_with_them() -> None:
    [run], problems = inspect_run(TRAIN, ["trainer.sed=3", "rollout.n=0", "trainer.total_epochs=7"], complete=False)
    assert len(problems) == 2
    assert run.config.trainer.total_epochs == 7
    assert run.config.actor_rollout_ref.rollout.n == 1, "the default"


def test_another_spelling_is_a_note_and_a_setting_without_effect_a_warning() -> None:
    report = Report()
    check_settings(["data.train_files=a", "model.path=b", "trainer.nnode=1", "actor.kl_loss_coef=0.1", *SIZES], report)
    found = {finding.place: finding for finding in report.findings}
    assert found["trainer.nnode"].severity == Severity.NOTE
    useless = found["actor_rollout_ref.actor.kl_loss_coef=0.1"]
    assert (useless.severity, useless.fix) == (Severity.WARNING, "remove it")


def test_there_is_no_hint_about_the_default_of_a_wrong_setting() -> None:
    report = Report()
    check_settings(["data.train_files=a", "model.path=b", *SIZES, "rollout.n=0"], report)
    assert [finding.problem for finding in report.findings] == ["0 must be at least 1"]


def test_all_that_is_wrong_with_settings_and_files_is_printed_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["trainer.sed=3", "actor.optim.lr=high", "data.train_files=tran.parquet", "model.path=./modl"]
    assert main(["train", "--dry-run", "--json", *SIZES, *wrong]) == 1
    report = json.loads(capsys.readouterr().out)
    errors = [finding["place"] for finding in report["findings"] if finding["severity"] == "error"]
    places = (
        "trainer.sed",
        "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.model.path=./modl",
        "data.train_files",
    )
    assert sorted(errors) == sorted(places)
    assert report["skipped"]["prompts"] == "until the settings and the model and the data are right"


def test_the_default_of_a_wrong_setting_is_not_reported(folder: Path) -> None:
    report = check_run([*SIZES, "model.path=model", "data.train_files=train.parquet", "trainer.n_gpus_per_node=x"])
    assert [finding.place for finding in report.findings] == ["trainer.n_gpus_per_node"]


def test_a_complete_model_has_no_findings_and_missing_files_are_named(folder: Path) -> None:
    assert not list(find_model_findings(make_config()))
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    Path("model/model.safetensors.index.json").write_text(json.dumps(index))
    [finding] = find_model_findings(make_config())
    assert "missing files: model-00001-of-00002.safetensors" in finding.problem
    Path("model/model.safetensors.index.json").unlink()
    weights = Path("model/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    [finding] = find_model_findings(make_config())
    assert finding.problem == "model.safetensors is not a complete safetensors file"
    weights.unlink()
    [finding] = find_model_findings(make_config())
    assert finding.problem == "has no weights (*.safetensors)"
    Path("model/config.json").unlink()
    [finding] = find_model_findings(make_config())
    assert finding.problem == "config.json is missing"


def test_a_disk_that_is_too_small_for_all_checkpoints_that_are_kept_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("trainer.save_freq=1", "trainer.total_training_steps=6")
    assert count_kept_checkpoints(config) == 6
    assert count_kept_checkpoints(make_config("trainer.save_freq=1", "trainer.max_ckpts_to_keep=2")) == 2
    assert count_kept_checkpoints(make_config()) == 1, "after the last step"
    assert count_kept_checkpoints(make_config("trainer.save_freq=-1")) == 0
    assert not list(find_folder_findings(config))
    from verl.trainer.build.preflight import estimate_checkpoint_bytes

    usage = namedtuple("usage", "total used free")
    room = int(3.5 * estimate_checkpoint_bytes(config))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(room, 0, room))
    [finding] = find_folder_findings(config)
    assert finding.severity == Severity.WARNING
    assert "keeps 6 checkpoints" in finding.problem
    assert finding.fix.startswith("set trainer.max_ckpts_to_keep=2,"), (
        "one more is written before the oldest is removed"
    )


def test_a_checkpoint_to_resume_from_has_to_exist(folder: Path) -> None:
    where = ("trainer.resume_mode=path", "trainer.resume_from_path=run/global_step_3")
    [finding] = find_folder_findings(make_config(*where))
    assert finding.place == "trainer.resume_from_path=run/global_step_3"
    Path("run/global_step_3").mkdir(parents=True)
    assert not list(find_folder_findings(make_config(*where)))


@pytest.mark.parametrize(
    ("settings", "gpus", "place", "fix"),
    [
        ((), 0, None, ""),
        (("trainer.n_gpus_per_node=8",), 8, None, ""),
        (("trainer.n_gpus_per_node=8",), 4, "trainer.n_gpus_per_node", "set trainer.n_gpus_per_node=4"),
        (("trainer.n_gpus_per_node=8", "trainer.device=cpu"), 4, "trainer.n_gpus_per_node", "Set trainer.n_gpus_per"),
        (("trainer.device=cuda",), 0, "trainer.device", "run it on a machine with GPUs"),
        (("trainer.nnodes=2",), 8, "trainer.nnodes", "start Ray on all machines"),
        (("trainer.nnodes=2", "ray_kwargs.ray_init.address=head:6379"), 8, None, ""),
    ],
)
def test_devices_are_compared_with_the_ranks(
    settings: tuple[str, ...], gpus: int, place: str | None, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "count_cores", lambda: 2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = list(find_device_findings(make_config(*settings), gpus))
    assert [finding.place for finding in found] == ([] if place is None else [place])
    assert all(finding.fix.lower().startswith(fix.lower()) for finding in found)


def test_addresses_have_to_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        config = make_config(f"reward.sandbox.url=http://127.0.0.1:{port}/run")
        assert not list(find_port_findings(config))
    [finding] = find_port_findings(config)
    assert finding.place == f"reward.sandbox.url=http://127.0.0.1:{port}/run"


def test_the_port_of_the_metrics_has_to_be_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        config = make_config("trainer.prometheus.enable=True", f"trainer.prometheus.port={port}")
        [finding] = find_port_findings(config)
    assert finding.place == "trainer.prometheus.port"
    assert f"127.0.0.1:{port} cannot be listened on" in finding.problem
    assert not list(find_port_findings(config))


def test_missing_and_old_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["torch>=9", "no-such-package", "numpy>=1", 'wandb>=99; extra == "wandb"']
    monkeypatch.setattr(machine, "requires", lambda name: needs)
    found = {finding.place: finding for finding in find_version_findings() if finding.severity == Severity.ERROR}
    assert list(found) == ["torch", "no-such-package"]
    assert found["torch"].problem.endswith("verl needs torch>=9")
    assert found["no-such-package"].fix == 'pip install "no-such-package"'


def test_sequences_have_to_fit_the_positions_of_the_model(folder: Path) -> None:
    assert not list(find_length_findings(make_config("data.max_response_length=448")))
    [finding] = find_length_findings(make_config("data.max_response_length=449"))
    assert finding.fix == "set data.max_response_length=448"


def test_every_row_is_read_and_all_that_is_wrong_with_rows_is_found(folder: Path) -> None:
    assert check_prompts(make_config(), 10.0).findings == []
    rows = [make_row("1+1="), make_row("x" * 99), make_row("2+2=", data_source="gsm8"), make_row("")]
    write_rows("train.parquet", rows)
    result = check_prompts(make_config(), 10.0)
    assert str(result) == "all 4 rows against template and limits"
    said = [f"{finding.severity.name} {finding.problem}" for finding in result.findings]
    assert any("ERROR 1 prompts are longer than data.max_prompt_length=64" in text for text in said)
    assert any("ERROR data_source 'gsm8'" in text for text in said)
    assert any("WARNING train.parquet, row 3: the prompt is blank" in text for text in said)


@pytest.mark.parametrize(
    ("settings", "severity", "text"),
    [
        ("data.truncation=left", Severity.WARNING, "and are cut"),
        ("data.filter_overlong_prompts=true", Severity.WARNING, "1 of 2 prompts are longer"),
        ("data.filter_overlong_prompts=true data.max_prompt_length=1", Severity.ERROR, "none is left"),
    ],
)
def test_long_prompts_are_reported_as_they_are_handled(
    folder: Path, settings: str, severity: Severity, text: str
) -> None:
    write_rows("train.parquet", [make_row("1+1="), make_row("x" * 99)])
    [finding] = check_prompts(make_config(*settings.split()), 10.0).findings
    assert finding.severity == severity
    assert text in finding.problem


def test_reading_rows_ends_after_the_given_time(folder: Path) -> None:
    write_rows("train.parquet", [make_row(f"{index}") for index in range(2 * READ_AT_ONCE + 1)])
    data = DataInspector("train.parquet", describe_scorer=str, explain_no_scorer=str)
    assert data.inspect(max_prompt_length=9, is_overlong_fatal=True, seconds=0.0).rows == READ_AT_ONCE
    assert data.inspect(max_prompt_length=9, is_overlong_fatal=True).rows == 2 * READ_AT_ONCE + 1


def test_the_first_rows_have_their_prompts_and_columns(folder: Path) -> None:
    write_rows("train.parquet", [make_row("1", agent_name="a"), make_row("2")])
    rows = list(FirstRows("train.parquet", "prompt").iter_fields(("agent_name",)))
    assert [(number, fields) for number, _, fields in rows] == [(0, {"agent_name": "a"}), (1, {})]
    assert rows[1][1][0]["content"] == "2"
