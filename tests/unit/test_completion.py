"""Shell completion: commands, options, settings from the schema, and the script of bash."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from verl.cli import main
from verl.commands.arguments import COMMANDS
from verl.commands.completion import complete
from verl.config.load import SFT, TRAIN
from verl.config.schema import collect_settings
from verl.config.shell_completion import complete_setting

pytestmark = pytest.mark.unit

ENGINES = ["vllm", "sglang", "hf"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("verl", list(COMMANDS)),
        ("verl ", list(COMMANDS)),
        ("verl tr", ["train"]),
        ("verl train act", ["actor_rollout_ref."]),
        ("verl train +act", ["+actor_rollout_ref."]),
        ("verl train actor_rollout_ref.rollout.name=", [f"actor_rollout_ref.rollout.name={n}" for n in ENGINES]),
        ("verl train trainer.local=t", ["trainer.local=true"]),
        ("verl sft data.messages", ["data.messages_key="]),
        ("verl config --sft data.messages", ["data.messages_key"]),
        ("verl config --ch", ["--changed"]),
        ("verl merge --target", ["--target_dir"]),
        ("verl completion z", ["zsh"]),
        ("verl train --config-path ", []),
        ("verl train data.train_files=", []),
        ("verl unknown ", []),
    ],
)
def test_the_last_word_is_completed(line: str, words: list[str]) -> None:
    assert complete(line) == words


@pytest.mark.parametrize("run_type", [TRAIN, SFT], ids=["train", "sft"])
def test_every_supported_setting_is_reached_part_by_part(run_type) -> None:
    reached, open_keys = set(), [""]
    while open_keys:
        for word in complete_setting(open_keys.pop(), run_type):
            (open_keys if word.endswith(".") else []).append(word)
            reached.add(word.rstrip(".="))
    settings = collect_settings(run_type.root).values()
    assert reached == {setting.key for setting in settings}


def ask_bash(line: str) -> list[str]:
    assert main(["completion", "bash"]) == 0
    script = f'verl() {{ {shlex.quote(sys.executable)} -m verl "$@"; }}; '
    script += f'eval "$(verl completion bash)"; COMP_LINE={shlex.quote(line)}; COMP_POINT={len(line)}; _verl; '
    script += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()


def test_bash_gets_the_part_after_the_equals_sign_at_which_it_splits_words() -> None:
    assert ask_bash("verl train actor_rollout_ref.rollout.name=") == ENGINES
    assert ask_bash("verl train data.train_b") == ["data.train_batch_size="]


def test_a_shell_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 2
    assert "name a shell: bash, zsh, fish" in capsys.readouterr().err
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert "verl completion --line" in capsys.readouterr().out
