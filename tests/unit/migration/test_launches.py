"""Recorded calls of a launch script, and YAML files, become commands of verl."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from verl.cli import main
from verl.config.command_line import parse_overrides
from verl.config.load import load, load_sft
from verl.errors import VerlError
from verl.migration.capture import Call, Capture, restore_variables
from verl.migration.command import Migration, migrate, render
from verl.migration.launches import LaunchFile, find_launches, write_value

pytestmark = pytest.mark.unit

SCRIPT = Path("run.sh")
HOME = "/tmp/verl-migrate/home"
GRPO = [
    "python3",
    "-m",
    "verl.trainer.main_ppo",
    "--config-name=ppo_trainer",
    f"data.train_files=['{HOME}/a.parquet', 'b.parquet']",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.rollout.n=16",
    "+actor_rollout_ref.rollout.enable_prefix_caching=False",
    'trainer.logger=["console","tensorboard"]',
    "trainer.default_local_dir=${OUTPUT_DIR}/run `$5`",
    "trainer.project_name='a`b`$c'",
]


def find(*calls: list[str], variables: frozenset[str] = frozenset(), **fields) -> LaunchFile:
    return find_launches(SCRIPT, Capture([Call(words, **fields) for words in calls], 0, variables=variables))


def migrate_words(words: list[str], **fields) -> Migration:
    (launch,) = find(words, **fields).launches
    return migrate(launch)


def migrate_grpo() -> Migration:
    return migrate_words(GRPO, variables=frozenset({"OUTPUT_DIR"}))


def test_arguments_become_settings_and_defaults_of_the_origin_are_added() -> None:
    settings = migrate_grpo().settings
    assert settings["data.train_files"] == f"[{HOME}/a.parquet,b.parquet]"
    assert settings["actor_rollout_ref.rollout.n"] == "16"
    assert settings["trainer.total_epochs"] == "30"
    assert settings["algorithm.adv_estimator"] == "grpo"


def test_the_shell_expands_home_and_variables_that_the_script_does_not_set_and_nothing_else() -> None:
    result = migrate_grpo()
    text = render(result)
    assert '"data.train_files=[${HOME}/a.parquet,b.parquet]"' in text
    assert r'"trainer.default_local_dir=${OUTPUT_DIR}/run \`\$5\`"' in text
    assert "'trainer.project_name='\"'\"'a`b`$c'\"'\"''" in text
    assert any("OUTPUT_DIR" in note for note in result.notes)
    assert any("--config-name ppo_trainer" in note for note in result.notes)


def test_an_interpolation_of_settings_is_not_a_variable_of_the_shell() -> None:
    result = migrate_words([*GRPO[:3], "data.seed=1", "trainer.experiment_name=${data.seed}"])
    assert "'trainer.experiment_name=${data.seed}'" in render(result)


def test_each_changed_key_has_its_outcome_and_reason() -> None:
    changes = {change.key: change for change in migrate_grpo().changes}
    assert changes["actor_rollout_ref.model.use_remove_padding"].outcome == "dropped"
    forwarded = changes["actor_rollout_ref.rollout.enable_prefix_caching"]
    assert forwarded.outcome == "actor_rollout_ref.rollout.engine_kwargs.vllm.enable_prefix_caching=false"
    assert "vLLM" in forwarded.reason
    assert changes["trainer.total_epochs"].reason.startswith("other default")


def test_the_command_loads_without_an_alias() -> None:
    result = migrate_grpo()
    arguments = [text for text in result.command()[2:] if "${" not in text]
    (loaded,) = load(arguments, complete=False)
    assert not [hint for hint in loaded.hints if "alias" in hint]
    command = "".join(line for line in render(result).splitlines(True) if not line.startswith("#"))
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:2] == ["verl", "train"]
    assert {word.partition("=")[0] for word in words[2:]} == set(result.settings)


def test_features_that_are_missing_are_refused_and_not_in_the_command() -> None:
    result = migrate_words(
        [
            *GRPO[:3],
            "actor_rollout_ref.model.mtp.enable=True",
            "actor_rollout_ref.rollout.name=trtllm",
            "algorithm.adv_estimator=rloo",
            "no.such.key=1",
        ]
    )
    assert not result.is_complete
    assert len(result.problems) == 3
    assert result.settings["algorithm.adv_estimator"] == "rloo"
    assert not any(key.endswith((".enable", ".name", ".key")) for key in result.settings)


def test_modules_of_the_user_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_module_of_a_test.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    result = migrate_words([*GRPO[:3], "actor_rollout_ref.model.external_lib=own_module_of_a_test"])
    assert result.settings["actor_rollout_ref.model.external_lib"] == "own_module_of_a_test"


def test_every_line_of_a_comment_is_a_comment() -> None:
    result = migrate_words([*GRPO[:3], "no.such.key=a\nrm -rf /", "trainer.experiment_name='x\ny'"])
    command, _, comments = render(result).partition("\n\n")
    assert shlex.split(command.replace("\\\n", ""))[2] == "trainer.experiment_name='x\ny'"
    assert all(line.startswith("#") for line in comments.splitlines() if line)


def test_adapters_stay_off() -> None:
    result = migrate_words([*GRPO[:3], "actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.lora_alpha=32"])
    (loaded,) = load(result.command()[2:], complete=False)
    assert loaded.config.actor_rollout_ref.actor.peft.lora_rank == 0
    assert "lora_rank" not in render(migrate_grpo())


def test_the_sizes_of_torchrun_become_settings() -> None:
    result = migrate_words(
        shlex.split(
            "torchrun --standalone --nnodes=1 --nproc_per_node 4 -m verl.trainer.sft_trainer "
            "data.train_files=a.parquet model.partial_pretrain=my-org/model model.use_liger=True optim.lr=1e-5"
        )
    )
    assert result.is_complete
    assert result.settings["trainer.n_gpus_per_node"] == "4"
    assert result.settings["data.messages_key"] == "messages"
    assert "data.max_token_len_per_gpu" in result.settings  # has an effect only with data.packing, set before it
    load_sft(result.command()[2:], complete=False)


def test_a_size_that_only_torchrun_knows_is_not_a_setting() -> None:
    result = migrate_words(["torchrun", "--nproc_per_node=gpu", "-m", "verl.trainer.sft_trainer"])
    assert result.settings["trainer.n_gpus_per_node"] == "1"  # the default of the origin


def test_the_file_of_a_module_is_found_and_the_output_of_generation_is_an_option() -> None:
    result = migrate_words(["python3", "verl/trainer/main_generation_server.py", "data.output_path=o.parquet"])
    assert result.command()[:4] == ["verl", "generate", "--output", "o.parquet"]


def test_exported_variables_and_the_folder_are_kept_but_secrets_are_not() -> None:
    token = "hf_" + "a1B2" * 9
    exports = {"VLLM_USE_V1": "1", "HF_HOME": f"{HOME}/hf", "HF_TOKEN": token}
    text = render(migrate_words(GRPO[:3], exports=exports, folder="/tmp/verl-migrate/root/my work"))
    assert text.startswith("cd '/my work'\nexport VLLM_USE_V1=1\nexport HF_HOME=\"${HOME}/hf\"\nverl train")
    assert token not in text
    assert "HF_TOKEN is a secret" in text


def test_other_commands_are_listed_and_used_outputs_are_noted() -> None:
    found = find(["nvidia-smi", "-L"], ["date", "+%F"], ["mkdir", "-p", f"{HOME}/x"], GRPO, is_output_used=True)
    assert found.other_commands == ["nvidia-smi -L", "mkdir -p ${HOME}/x"]
    assert any("nvidia-smi" in note and "empty" in note for note in found.notes)
    assert any("date" in note and "this machine" in note for note in found.notes)


def test_the_launcher_of_a_run_is_noted() -> None:
    (launch,) = find(["ray", "job", "submit", "--address=a", "--", *GRPO]).launches
    assert any("ray job submit --address=a" in note for note in launch.notes)


def test_a_variable_that_is_not_set_is_named() -> None:
    found = find(GRPO, variables=frozenset({"OUTPUT_DIR", "OTHER"}))
    assert any(note.startswith("OUTPUT_DIR") and "stays in the command" in note for note in found.notes)
    assert any(note.startswith("OTHER") and "verl migrate run.sh OTHER=VALUE" in note for note in found.notes)


@pytest.mark.parametrize(
    "words",
    [["--config-path=config", "--config-name=ppo_megatron_trainer.yaml", "data.seed=1"], ["-cn", "ppo_megatron"]],
)
def test_a_configuration_of_megatron_chooses_the_engine(words: list[str]) -> None:
    (launch,) = find(["python", "-m", "verl.trainer.main_ppo", *words]).launches
    assert {"actor_rollout_ref.actor.strategy=megatron", "critic.strategy=megatron"} <= {*launch.overrides}


def test_a_module_of_a_missing_feature_is_refused_by_its_name() -> None:
    with pytest.raises(VerlError, match="requires Megatron-Core, which is not supported yet"):
        find(["python", "-m", "verl_mlite.launch"])


def test_a_module_of_asynchronous_training_brings_its_defaults() -> None:
    words = ["python", "-m", "verl.experimental.fully_async_policy.fully_async_main", *GRPO[3:]]
    arguments = migrate_words([*words, "async_training.staleness_threshold=0.5", "data.train_batch_size=0"]).command()
    assert "async_training.staleness_threshold=0.5" in arguments
    assert {"actor_rollout_ref.hybrid_engine=false", "async_training.trigger_parameter_sync_step=4"} <= set(arguments)
    (loaded,) = load([text for text in arguments[2:] if "${" not in text], complete=False)
    assert loaded.config.trainer.max_staleness == 2
    words = ["python", "-m", "verl.experimental.one_step_off_policy.main_ppo", *GRPO[3:]]
    assert "trainer.max_staleness=1" in migrate_words(words).command()


def test_a_script_that_launches_nothing_is_explained() -> None:
    captured = Capture([Call(["python", "train.py"])], 1, ["A: set A"], "Usage: run.sh SIZE", frozenset({"A"}))
    with pytest.raises(VerlError) as error:
        find_launches(SCRIPT, captured)
    for part in ("exit code 1", "bash: A: set A", "python train.py", "Usage: run.sh SIZE", "A=VALUE"):
        assert part in str(error.value)


def test_paths_of_the_sandbox_become_those_of_the_machine() -> None:
    assert restore_variables(f"{HOME}/x /tmp/verl-migrate/root/work/y") == "${HOME}/x /work/y"


def test_values_keep_their_quotes() -> None:
    words = [*GRPO[:3], 'trainer.experiment_name="a, b"', "data.train_files=['x y.parquet']"]
    (loaded,) = load(migrate_words(words).command()[2:], complete=False)
    assert loaded.config.trainer.experiment_name == "a, b"
    assert loaded.config.data.train_files == ["x y.parquet"]


@given(st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"])))
@example("\\d+ (x)")
@example("it's \\' \\")
def test_hydra_reads_a_written_value_as_it_was(value: str) -> None:
    assume("${" not in value)
    value = f"name {value}"  # a number would be read as one
    problems: list[str] = []
    [override] = parse_overrides([f"trainer.experiment_name={write_value(value)}"], problems)
    assert (override.value(), problems) == (value, [])


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
    assert "defaults: is dropped" in text


@pytest.mark.parametrize(
    ("content", "code"), [("trainer: {device: npu}\nreward: {}\n", 1), ("- 1\n", 2), ("a: [\n", 2)]
)
def test_exit_codes_of_yaml_files(content: str, code: int, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(content)
    assert main(["migrate", str(file)]) == code


@pytest.mark.parametrize("words", [["none.sh"], ["none.yaml"], [], ["run.sh", "x"], ["--verbose"]])
def test_wrong_arguments_are_reported(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", *words]) == 2
    message = capsys.readouterr().err
    assert any(text in message for text in ("cannot be read", "NAME=VALUE", "verl migrate --help"))
