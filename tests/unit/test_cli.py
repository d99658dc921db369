"""The command `verl`: what it prints, where, with which exit code, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from tiny import chat_tokenizer

import verl
from verl.cli import COMMANDS, main
from verl.config.load import load
from verl.demo.assets import make_assets
from verl.errors import DataError
from verl.sft.torchrun import adapt_to_torchrun

pytestmark = pytest.mark.unit


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text and summary in text for name, summary in COMMANDS.items())
    assert main([]) == 0
    assert capsys.readouterr().out == text
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"verl {verl.__version__}\n"


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_subcommand_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: verl {name}")


def test_an_unknown_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    known = (
        "Commands: train, sft, demo, data, generate, eval, merge, config, watch, show, report, runs, compare, explain, "
        "audit, replay, scale, doctor, gpu-check, reward-test, plan, migrate, env, completion."
    )
    assert capsys.readouterr().err == f"verl: unknown command 'trian'. Did you mean 'train'? {known}\n"
    assert main(["xyz"]) == 2
    assert capsys.readouterr().err == f"verl: unknown command 'xyz'. {known}\n"


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("verl", ""),
        ("verl.trainer.main_ppo", " train"),
        ("verl.trainer.sft_trainer", " sft"),
        ("verl.trainer.main_ppo_sync", " train"),
        ("verl.experimental.fully_async_policy.fully_async_main", " train"),
        ("verl.experimental.one_step_off_policy.main_ppo", " train"),
        ("verl.trainer.main_generation", " generate"),
        ("verl.trainer.main_generation_server", " generate"),
        ("verl.trainer.main_eval", " eval"),
        ("verl.model_merger", " merge"),
    ],
)
def test_modules_that_are_run_directly_are_commands(module: str, command: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"usage: verl{command}"), done.stderr
    if command:
        wrong = [sys.executable, "-m", module, "--no-such-option", "no.such_setting=1"]
        done = subprocess.run(wrong, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_config_prints_yaml_and_marks_what_was_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "rollout.n=8", "data.train_batch_size=256"]) == 0
    printed = capsys.readouterr()
    changed = [line.split("#")[0].strip() for line in printed.out.splitlines() if "[changed from" in line]
    assert changed == ["train_batch_size: 256", "n: 8"]
    assert "responses per step            2,048" in printed.out
    assert printed.err == "", "a short name of a section is documented"
    assert main(["config", "trainer.nnode=2"]) == 0
    assert "hint: trainer.nnode is an alias of trainer.nnodes\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--check"], "run `verl doctor` with the same settings"),
        (["--lr", "1e-5"], "set optim.lr=1e-6"),
        (["--model_name_or_path=org/model"], "set model.path=MODEL"),
        (["--trainer.seed=3"], "write trainer.seed=3"),
        (["--config-nam", "x"], "use --config-name"),
        (["--unheard-of"], "write settings as key=value"),
    ],
)
def test_options_of_other_programs_get_a_hint(option: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *option, "model.path=some/model", "data.train_files=a.parquet"]) == 2
    head, problem = capsys.readouterr().err.splitlines()
    assert head == "1 setting is wrong:"
    assert problem.startswith(f"  - {option[0]}: is not an option; {said}")


def test_a_plan_without_a_model_names_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    error = capsys.readouterr().err
    assert "actor_rollout_ref.model.path: must be given" in error
    assert "???" not in error


def test_config_of_a_sweep_prints_one_document_for_each_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "-m", "actor_rollout_ref.rollout.n=4,8"]) == 0
    text = capsys.readouterr().out
    assert text.count("---\n") == 2
    assert "# actor_rollout_ref.rollout.n=8\n" in text


def test_config_changed_prints_a_file_that_loads_the_same_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["rollout.n=8", "trainer.logger=[console,wandb]", "+ray_kwargs.ray_init.namespace=mine"]
    given += ["+reward.custom_reward_function.reward_kwargs.scale=2", "trainer.seed=1"]
    assert main(["config", "--changed", *given]) == 0
    text = capsys.readouterr().out
    assert "seed" not in text, "1 is the default"
    assert "[changed from 1]" in text
    (tmp_path / "mine.yaml").write_text(text)
    [before], [after] = load(given, complete=False), load([f"--config-name={tmp_path}/mine"], complete=False)
    assert after.config == before.config
    assert main(["config", "--changed", "--json", *given]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "actor_rollout_ref": {"rollout": {"n": 8}},
        "trainer": {"logger": ["console", "wandb"]},
        "ray_kwargs": {"ray_init": {"namespace": "mine"}},
        "reward": {"custom_reward_function": {"reward_kwargs": {"scale": 2}}},
    }


def test_config_origin_names_the_file_the_command_line_and_the_alias(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("data: {seed: 3, train_batch_size: 8}\ntrainer: {total_epochs: 2, seed: 4}\n")
    given = [f"--config-name={tmp_path}/mine", "rollout.n=8", "data.train_batch_size=16", "~trainer.total_epochs"]
    assert main(["config", "--origin", "--json", *given]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["data.seed"] == {"value": 3, "origin": "mine.yaml"}
    assert table["data.train_batch_size"] == {"value": 16, "origin": "command line"}
    assert table["actor_rollout_ref.rollout.n"] == {"value": 8, "origin": "command line, as rollout.n"}
    assert table["trainer.total_epochs"] == {"value": 1, "origin": "default"}
    assert main(["config", "--origin", "--changed", *given]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "#" in line]
    assert ["seed:", "4", "#", "mine.yaml"] in lines
    assert len(lines) == 4


def test_config_json_prints_one_object_for_each_point_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--sft", "--json", "-m", "optim.lr=1e-5,1e-6"]) == 0
    runs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [run["optim"]["lr"] for run in runs] == [1e-5, 1e-6]
    assert main(["config", "--json", "data.seed"]) == 2
    assert "remove data.seed" in capsys.readouterr().err


def test_config_with_a_bare_key_explains_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "config",
                "data.train_batch_size",
                "rollout.name",
                "trainer.nnodes",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "Prompts per step" in text
    assert "default: 1024" in text
    assert "vllm | sglang | hf" in text
    assert "also:    trainer.nnode" in text


def test_config_with_a_word_searches_names_and_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "kl loss", "nnode", "bonus"]) == 0
    by_both, by_alias, by_description = capsys.readouterr().out.split("\n\n")
    keys = [line.split()[0] for line in by_both.splitlines()[1:]]
    assert keys[:3] == [f"actor_rollout_ref.actor.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type")]
    assert "distillation.coef" in keys, "its name has neither word"
    assert "trainer.nnodes " in by_alias
    assert by_description.splitlines()[1].split()[0] == "actor_rollout_ref.actor.entropy_coeff"
    assert main(["config", "armup"]) == 2, "the end of a word"
    assert "no name or description has it" in capsys.readouterr().err
    assert main(["config", "entrpy"]) == 2
    assert "did you mean entropy?" in capsys.readouterr().err


def test_config_with_the_key_of_a_section_lists_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "algorithm"]) == 0
    assert "algorithm.kl_ctrl.kl_coef" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["data.train_batchsize"], ["data.train_batchsize=3"]])
def test_wrong_settings_end_with_code_2_and_the_message_alone(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "did you mean data.train_batch_size?" in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(("command", "module"), [("train", "verl.commands.train"), ("demo", "verl.commands.demo")])
def test_train_and_demo_pass_their_arguments_on(
    command: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []
    stand_in = types.ModuleType(module)
    stand_in.main = lambda argv: seen.append(argv) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, stand_in)
    assert main([command, "a=1", "-m"]) == 0
    assert seen == [["a=1", "-m"]]

    def fail(argv: list[str]) -> None:
        raise DataError("train.parquet: not found")

    stand_in.main = fail  # type: ignore[attr-defined]
    assert main([command]) == 2
    assert capsys.readouterr().err == "train.parquet: not found\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "data.train_batch_size=8"],
        ["config", "--schema"],
        ["config", "entropy"],
        ["train", "--help"],
        ["env"],
        ["completion", "--line", "verl train d"],
    ],
)
def test_settings_and_help_import_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys; from verl.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'ray', 'numpy', 'transformers', 'vllm', 'pyarrow'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_under_torchrun_only_the_first_process_runs_and_the_sizes_are_settings() -> None:
    launched = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "PATH": "p"}
    settings = ["data.seed=1", "trainer.nnodes=3"]
    argv, is_first = adapt_to_torchrun(settings, launched)
    assert argv == ["data.seed=1", "trainer.nnodes=3", "trainer.n_gpus_per_node=4"]
    assert is_first
    assert launched == {"PATH": "p"}  # else workers would take them for their own
    assert adapt_to_torchrun(settings, {"TORCHELASTIC_RUN_ID": "x", "RANK": "1"})[1] is False
    assert adapt_to_torchrun(settings, {"RANK": "1", "WORLD_SIZE": "2"}) == (settings, True)


def write_rows(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_data_shows_files_and_ends_with_1_if_something_would_stop_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "raw.jsonl", *({"question": f"{n}+2=?", "answer": "4"} for n in range(3)))
    assert main(["data", path]) == 1
    assert "Set data.prompt_key=question" in capsys.readouterr().out
    own = "reward.custom_reward_function.path=my_reward.py"
    assert main(["data", path, "--row", "2", "data.prompt_key=question", own]) == 0
    text = capsys.readouterr().out
    assert "│ 2+2=?" in text
    assert "my_reward.py:compute_score" in text
    assert "✓ none found" in text


def test_data_takes_the_files_of_the_settings_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "1", "data_source": "gsm8k", "answer": "1"}
    write_rows(tmp_path / "train.jsonl", row)
    test = write_rows(tmp_path / "test.jsonl", {**row, "prompt": "2"})
    (tmp_path / "mine.yaml").write_text(f"data:\n  train_files: {tmp_path / 'train.jsonl'}\n")
    settings = ["--config-path", str(tmp_path), "--config-name", "mine", f"data.val_files={test}"]
    assert main(["data", *settings, "--head", "2"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[1] for line in text.splitlines() if line.startswith("──")][:2] == ["train.jsonl", "test.jsonl"]
    assert "── row 1 " in text
    assert main(["data"]) == 2
    assert "name a file, such as `verl data train.parquet`" in capsys.readouterr().err
    assert main(["data", str(tmp_path / "tset.jsonl")]) == 2
    assert f"Did you mean {test}?" in capsys.readouterr().err


def test_data_shows_what_supervised_training_would_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_assets(tmp_path / "assets").model
    chat_tokenizer().save_pretrained(model)
    said = [("user", "1+1?"), ("assistant", "2"), ("user", "sure?"), ("assistant", "yes")]
    messages = [{"role": role, "content": content} for role, content in said]
    path = write_rows(tmp_path / "talks.jsonl", {"messages": messages}, {"messages": messages[:2]})
    settings = ["--sft", path, f"model.path={model}", "data.messages_key=messages"]
    assert main(["data", *settings]) == 0
    text = capsys.readouterr().out
    assert [line.strip() for line in text.splitlines() if line.startswith('  "')] == [
        '"2<|end|>"',
        '"yes<|end|>"',
    ]
    assert "all are within data.max_length" in text
    assert main(["data", *settings, "data.max_length=20"]) == 2
    assert "line 1: the example has" in capsys.readouterr().err
    assert main(["data", "--sft", path]) == 2
    assert "model.path: must be given" in capsys.readouterr().err


def test_data_without_a_model_imports_no_torch_and_no_transformers(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "1", "data_source": "gsm8k", "answer": "1"})
    script = (
        "import sys; from verl.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'ray', 'transformers', 'vllm'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", script, "data", path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_an_unexpected_error_is_printed_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise RuntimeError("cannot log in with plain-old-words at http://ann:pa55word@host")

    monkeypatch.setattr("verl.commands.train.main", fail)
    assert main(["train", "+x.api_key=plain-old-words"]) == 1
    output = capsys.readouterr().err
    assert output.endswith("RuntimeError: cannot log in with *** at http://ann:***@host\n")


def test_settings_are_printed_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    secret = "reward.custom_reward_function.reward_kwargs"
    assert main(["config", f"+{secret}.api_key=plain-old-words", "reward.sandbox.url=http://u:plain-old@h/"]) == 0
    output = capsys.readouterr().out
    assert "reward_kwargs: {api_key: '***'}" in output
    assert "plain-old" not in output
    for flags in (["--json"], ["--json", "--origin"], ["--changed"], ["--changed", "--origin"]):
        main(["config", *flags, f"+{secret}.api_key=plain-old-words", "reward.sandbox.url=http://u:plain-old@h/"])
        assert "plain-old" not in capsys.readouterr().out
