"""Launch scripts run in the sandbox: every program is recorded, and nothing of the machine changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.cli import main
from verl.errors import RewardError, VerlError
from verl.migration import capture as module
from verl.migration.capture import Capture, capture, restore_variables
from verl.rewards.sandbox.sandbox import best_isolation

pytestmark = pytest.mark.contract
LAUNCH = "python3 -m verl.trainer.main_ppo"


@pytest.fixture(autouse=True)
def _require_a_sandbox() -> None:
    if best_isolation() == "limits":
        pytest.skip("neither bubblewrap nor namespaces work on this machine")


def record(tmp_path: Path, text: str, *arguments: str, **variables: str) -> Capture:
    file = tmp_path / "run.sh"
    file.write_text(text)
    return capture(file, variables, arguments)


def launches(captured: Capture) -> list[list[str]]:
    return [call.words[3:] for call in captured.calls if call.words[0].startswith("python")]


def test_arguments_are_recorded_exactly(tmp_path: Path) -> None:
    odd = ["a b", "", "new\nline", "$HOME", "'\"`\\", "*", "ü"]
    assert launches(record(tmp_path, f'{LAUNCH} "$@"', *odd)) == [odd]


def test_nothing_outside_the_sandbox_is_changed_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, target = tmp_path / "secret.txt", tmp_path / "written"
    secret.write_text("my secret")
    monkeypatch.setenv("API_KEY", "my key")
    captured = record(
        tmp_path,
        f"touch {target}; echo x > {target}; /usr/bin/touch {target}; rm -rf {secret}; /bin/rm -rf {secret}\n"
        f'{LAUNCH} a="$(cat {secret} {Path(__file__)})" b=$API_KEY c="$(ls -A ~)" d="$(cat /etc/passwd)"',
    )
    assert launches(captured) == [["a=", "b=${API_KEY}", "c=", "d="]]
    assert secret.read_text() == "my secret"
    assert not target.exists()


def test_there_is_no_network(tmp_path: Path) -> None:
    text = f"if (exec 3<>/dev/tcp/127.0.0.1/22) 2>/dev/null; then s=open; else s=closed; fi; {LAUNCH} a=$s"
    assert launches(record(tmp_path, text)) == [["a=closed"]]


def test_programs_that_do_not_exist_are_recorded_and_succeed(tmp_path: Path) -> None:
    captured = record(tmp_path, f"set -e\nwget -q http://x/y\nhf download m --local-dir d\n{LAUNCH} a=1\n")
    assert [call.words for call in captured.calls][:2] == [
        ["wget", "-q", "http://x/y"],
        ["hf", "download", "m", "--local-dir", "d"],
    ]
    assert captured.exit_code == 0


def test_python_is_a_stand_in_if_the_script_replaces_its_path(tmp_path: Path) -> None:
    captured = record(tmp_path, f"export PATH=/usr/bin:/bin\n{LAUNCH} a=1\n/usr/bin/{LAUNCH} a=2\n")
    assert launches(captured) == [["a=1"], ["a=2"]]


def test_used_outputs_are_marked(tmp_path: Path) -> None:
    captured = record(tmp_path, f"n=$(nvidia-smi -L | wc -l)\npip list\n{LAUNCH} a=$n")
    assert [call.is_output_used for call in captured.calls] == [True, False, False]


def test_required_variables_stay_open_or_are_given(tmp_path: Path) -> None:
    text = f"set -u\n: ${{MODEL:?set it}}\n{LAUNCH} path=$MODEL seed=$SEED $EMPTY"
    captured = record(tmp_path, text, EMPTY="")
    assert launches(captured) == [["path=${MODEL}", "seed=${SEED}"]]
    assert captured.variables == {"MODEL", "SEED"}
    assert launches(record(tmp_path, text, MODEL="m", SEED="1", EMPTY="a b")) == [["path=m", "seed=1", "a", "b"]]


def test_a_variable_that_decides_what_the_script_does_is_empty(tmp_path: Path) -> None:
    text = f'if [ -n "$DEBUG" ]; then n=1; else n=8; fi\n{LAUNCH} n=$n x=$DEBUG m=$((SIZE + 1))'
    captured = record(tmp_path, text)
    assert launches(captured) == [["n=8", "x=", "m=1"]]
    assert captured.variables == {"DEBUG"}


def test_folders_and_files_of_other_machines_are_replaced(tmp_path: Path) -> None:
    captured = record(
        tmp_path,
        "set -euo pipefail\nsource /opt/venv/bin/activate\n. env_of_cluster/setup.sh\ncd /workspace/verl\n"
        f"{LAUNCH} a=$(pwd) > /data/logs/x.log 2>&1\n/mnt/conda/bin/{LAUNCH} a=2\n",
    )
    assert launches(captured) == [["a=/workspace/verl"], ["a=2"]]
    assert captured.exit_code == 0
    assert captured.calls[0].words == ["source", "/opt/venv/bin/activate"]
    assert captured.calls[-1].folder == "/workspace/verl"


def test_folders_that_cannot_be_replaced_are_reported(tmp_path: Path) -> None:
    captured = record(tmp_path, f"cd /usr/of-a-test\nfor i in {{1..80}}; do cd /f$i; done\n{LAUNCH} a=1")
    assert launches(captured) == [["a=1"]]
    assert "cd: /usr/of-a-test: No such file or directory" in captured.complaints


def test_files_beside_the_script_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "env.sh").write_text("SEED=5\n")
    (tmp_path / "inner.sh").write_text(f'{LAUNCH} seed=$1 "$2"\n')
    monkeypatch.chdir(tmp_path)
    captured = record(tmp_path, 'source common/env.sh\nbash "$(dirname "$0")/inner.sh" $SEED "$PWD"\n')
    ((seed, folder),) = launches(captured)
    assert (seed, restore_variables(folder)) == ("seed=5", str(tmp_path))


def test_environment_of_a_launch_is_what_the_script_exports(tmp_path: Path) -> None:
    captured = record(tmp_path, f"export A=1; B=2; C=3 {LAUNCH}; {LAUNCH}", D="4")
    assert [dict(call.exports) for call in captured.calls] == [{"A": "1", "C": "3"}, {"A": "1"}]


def test_launches_in_the_background_are_recorded(tmp_path: Path) -> None:
    assert launches(record(tmp_path, f"(sleep 1; sleep 1; {LAUNCH} a=1) > /dev/null 2>&1 &\n")) == [["a=1"]]


def test_time_and_output_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 2.0)
    captured = record(tmp_path, f"{LAUNCH} a=1\nwhile true; do echo flood; done")
    assert captured.exit_code != 0
    assert launches(captured) == [["a=1"]]
    assert len(captured.output) < 1 << 18
    assert record(tmp_path, "read x < <(while true; do :; done)").exit_code is None


def test_without_a_sandbox_nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise RewardError("no way")

    monkeypatch.setattr(module, "run", lambda *_, **__: pytest.fail("the script was executed"))
    for isolation in (lambda: "limits", fail):
        monkeypatch.setattr(module, "best_isolation", isolation)
        with pytest.raises(VerlError, match=r"apt-get install bubblewrap.*Nothing was executed"):
            record(tmp_path, LAUNCH)


def test_the_command_prints_a_script_that_bash_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        f'pip install x\nexport A="b c"\n{LAUNCH} data.train_files=$DATA/x.parquet trainer.experiment_name=$NAME "$@"\n'
    )
    assert main(["migrate", str(file), "NAME=my", "--", "data.seed=3", "trainer.device=npu"]) == 1
    text = capsys.readouterr().out
    assert "export A='b c'\nverl train" in text
    assert "# - pip install x" in text
    check = tmp_path / "check.sh"
    check.write_text('verl() { python3 -m verl.trainer.main_ppo "$@"; }\n' + text)
    ((command, *arguments),) = launches(record(tmp_path, check.read_text(), DATA="my data"))
    assert command == "train"
    assert {"data.train_files=my data/x.parquet", "trainer.experiment_name=my", "data.seed=3"} <= set(arguments)


def test_a_script_that_launches_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.sh"
    file.write_text("echo hello; python3 other.py; exit 3\n")
    assert main(["migrate", str(file)]) == 2
    message = capsys.readouterr().err
    for part in ("starts none of", "exit code 3", "python3 other.py", "hello"):
        assert part in message
