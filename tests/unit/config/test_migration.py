"""Launch scripts become commands, without being run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from verl.cli import main
from verl.config.legacy.launch_script import read_script
from verl.config.legacy.migration import migrate, render
from verl.config.load import load, load_sft
from verl.errors import VerlError

pytestmark = pytest.mark.unit

GRPO = """\
#!/bin/bash
set -xeuo pipefail
MODEL=${MODEL_PATH:-my-org/model-7b}   # where the model is
prompt_length=512; response_length=$((prompt_length * 4))
total=$(($prompt_length + ${response_length}))
EXTRA="trainer.nnodes=2 trainer.seed=7"
common=(
    data.train_files="['a.parquet', 'b.parquet']"
    # data.seed=99
    data.max_prompt_length=$prompt_length
)
common+=(data.max_response_length="${response_length}")
if [ "$1" = fast ]; then
    n=4
else
    n=16
fi
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo --config-name=ppo_trainer \\
    "${common[@]}" \\
    algorithm.adv_estimator=grpo \\
    # trainer.total_epochs=99 \\
    actor_rollout_ref.model.path="$MODEL" \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.rollout.n=$n \\
    actor_rollout_ref.rollout.max_model_len=${total} \\
    +actor_rollout_ref.rollout.enable_prefix_caching=False \\
    trainer.logger='["console","tensorboard"]' \\
    trainer.default_local_dir=${OUTPUT_DIR}/run \\
    trainer.experiment_name=test_$(date +%Y) \\
    $EXTRA "$@" 2>&1 | tee train.log
echo finished
"""


def migrate_text(text: str):
    (command,) = read_script(text)
    return migrate(command)


def test_variables_arrays_defaults_and_arithmetic_are_read() -> None:
    settings = migrate_text(GRPO).settings
    assert settings["data.train_files"] == "[a.parquet,b.parquet]"
    assert settings["data.max_response_length"] == "2048"
    assert settings["actor_rollout_ref.rollout.max_model_len"] == "2560"
    assert settings["actor_rollout_ref.model.path"] == "my-org/model-7b"
    assert (settings["trainer.nnodes"], settings["trainer.seed"]) == ("2", "7")
    assert "data.seed" not in settings


def test_comments_between_continued_lines_do_not_end_the_command() -> None:
    settings = migrate_text(GRPO).settings
    assert settings["trainer.total_epochs"] == "30"  # the default of the origin, not the comment's
    assert settings["actor_rollout_ref.rollout.n"] == "16"


def test_what_the_script_does_not_say_is_noted_and_left_to_the_shell() -> None:
    result = migrate_text(GRPO)
    text = render(result)
    assert '"trainer.default_local_dir=${OUTPUT_DIR}/run"' in text
    assert any("OUTPUT_DIR" in note for note in result.notes)
    assert any("n is set inside a condition" in note for note in result.notes)
    assert any("--config-name ppo_trainer" in note for note in result.notes)


def test_each_changed_key_has_its_outcome_and_reason() -> None:
    changes = {change.key: change for change in migrate_text(GRPO).changes}
    assert changes["actor_rollout_ref.model.use_remove_padding"].outcome == "dropped"
    forwarded = changes["actor_rollout_ref.rollout.enable_prefix_caching"]
    assert forwarded.outcome == "actor_rollout_ref.rollout.engine_kwargs.vllm.enable_prefix_caching=false"
    assert "vLLM" in forwarded.reason
    assert changes["trainer.total_epochs"].reason.startswith("other default")


def test_the_command_loads_without_an_alias() -> None:
    result = migrate_text(GRPO)
    arguments = [text for text in result.command()[2:] if "${" not in text and "$(" not in text]
    (loaded,) = load(arguments, complete=False)
    assert not [hint for hint in loaded.hints if "alias" in hint]
    command = "".join(line for line in render(result).splitlines(True) if not line.startswith("#"))
    command = command.replace("\\\n", "")
    assert shlex.split(command)[:2] == ["verl", "train"]
    assert set(shlex.split(command)[2:]) == set(result.command()[2:])


def test_features_that_are_missing_are_refused_and_left_out() -> None:
    result = migrate_text(
        "python -m verl.trainer.main_ppo actor_rollout_ref.model.mtp.enable=True "
        "actor_rollout_ref.rollout.name=sglang algorithm.adv_estimator=rloo no.such.key=1"
    )
    assert not result.is_complete
    assert len(result.problems) == 3
    assert result.settings["algorithm.adv_estimator"] == "rloo"
    assert not any(key.endswith((".enable", ".name", ".key")) for key in result.settings)


def test_torchrun_becomes_settings() -> None:
    result = migrate_text(
        "torchrun --standalone --nnodes=1 --nproc_per_node 4 -m verl.trainer.sft_trainer "
        "data.train_files=a.parquet model.partial_pretrain=my-org/model model.use_liger=True optim.lr=1e-5"
    )
    assert result.is_complete
    assert result.settings["trainer.n_gpus_per_node"] == "4"
    assert result.settings["data.messages_key"] == "messages"
    assert "data.max_token_len_per_gpu" in result.settings  # has an effect only with data.packing, set before it
    load_sft(result.command()[2:], complete=False)


def test_the_file_of_a_module_is_found_and_the_output_of_generation_is_an_option() -> None:
    result = migrate_text("python3 verl/trainer/main_generation_server.py data.output_path=out.parquet rollout.n=2")
    assert result.command()[:4] == ["verl", "generate", "--output", "out.parquet"]


@pytest.mark.parametrize(
    "text",
    [
        "python -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' data.seed=1",
        "python -m verl.experimental.fully_async_policy.fully_async_main data.seed=1",
    ],
)
def test_a_command_that_needs_a_missing_feature_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(VerlError, match=r"requires (Megatron-Core|asynchronous training), which is not supported yet"):
        read_script(text)


def test_nothing_of_a_script_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "file"
    migrate_text(f"X=$(touch {target})\npython -m verl.trainer.main_ppo trainer.experiment_name=$X `touch {target}`")
    assert not target.exists()


def test_values_keep_their_quotes() -> None:
    text = "python -m verl.trainer.main_ppo 'trainer.experiment_name=\"a, b\"' data.train_files=\"['x y.parquet']\""
    (loaded,) = load(migrate_text(text).command()[2:], complete=False)
    assert loaded.config.trainer.experiment_name == "a, b"
    assert loaded.config.data.train_files == ["x y.parquet"]


def test_the_command_reads_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "defaults: [ppo_trainer]\nalgorithm: {adv_estimator: grpo}\ntrainer: {balance_batch: true, logger: [console]}\n"
        "data: {train_files: 'my data.parquet'}\n"
    )
    assert main(["migrate", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("verl train \\\n")
    assert "# trainer.balance_batch" in text
    assert "defaults: is left out" in text


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("a.sh", "python -m verl.trainer.main_ppo trainer.device=npu\n", 1),
        ("a.sh", "echo hello\n", 2),
        ("a.yaml", "- 1\n", 2),
        ("a.yaml", "a: [\n", 2),
    ],
)
def test_exit_codes(name: str, content: str, code: int, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert main(["migrate", str(tmp_path / name)]) == code


def test_a_missing_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", str(tmp_path / "none.sh")]) == 2
    assert "cannot be read" in capsys.readouterr().err
