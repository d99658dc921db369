"""A rollout engine in another Python environment: where it runs, how it ends, and what it reports."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from tiny import tiny_qwen2
from transformers import Qwen2ForCausalLM

from tests.second_environment import make_environment
from verl.config.interpreters import find_interpreter_problem
from verl.config.rollout_engines import RolloutEngineSpec, get_rollout_engine
from verl.errors import EngineError, ProcessLostError, WeightSyncError
from verl.rollout.engine import make_engine
from verl.rollout.isolated.engine import IsolatedEngine
from verl.rollout.settings import RolloutEngineSettings
from verl.types import SamplingParams

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]
HF = get_rollout_engine("hf")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(tiny_qwen2()).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_environment(tmp_path_factory.mktemp("environment"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(path: str, python: str) -> AsyncIterator[IsolatedEngine]:
    made = make_engine(HF, RolloutEngineSettings(path, load_format="auto"), python)
    assert isinstance(made, IsolatedEngine)
    await made.start()
    yield made
    await made.close()


def process_of(engine: IsolatedEngine) -> psutil.Process:
    assert engine._process is not None
    return psutil.Process(engine._process.pid)


async def test_the_engine_runs_in_the_other_environment(engine: IsolatedEngine, python: str) -> None:
    assert process_of(engine).cmdline()[0] == python
    prefix = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert prefix.stdout.strip() == str(Path(python).parent.parent) != sys.prefix
    assert (await engine.generate([1, 2], SamplingParams(max_tokens=3))).versions.tolist() == [-1] * 3


async def test_errors_keep_their_type_and_message(engine: IsolatedEngine) -> None:
    await engine.start_weight_update()
    with pytest.raises(WeightSyncError, match="weights do not fit: missing"):
        await engine.finish_weight_update(1)
    with pytest.raises(EngineError, match="IndexError"):
        await engine.compute_logprobs([[10**6, 1]])


async def test_a_canceled_request_is_canceled_in_the_engine(engine: IsolatedEngine) -> None:
    request = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=5)))
    queued = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=20_000)))
    await request
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    assert not engine._waiting


async def test_the_death_of_the_process_is_a_lost_process(engine: IsolatedEngine) -> None:
    """The last test of this engine."""
    request = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=20_000)))
    await engine.version()
    process_of(engine).send_signal(signal.SIGKILL)
    with pytest.raises(ProcessLostError, match="has ended with code -9"):
        await request
    with pytest.raises(ProcessLostError, match="has ended with code -9"):
        await engine.version()


async def test_an_engine_that_cannot_be_created_says_why(python: str) -> None:
    missing = RolloutEngineSpec(name="missing", title="Missing", engine="no_such_module:Engine")
    made = IsolatedEngine(missing, RolloutEngineSettings("model"), python)
    with pytest.raises(EngineError, match="No module named 'no_such_module'"):
        await made.start()
    assert made._process is not None
    assert made._process.returncode is not None, "its process has ended"
    await made.close()


async def test_an_engine_whose_process_ends_while_it_starts_is_no_reason_to_restart_the_run(python: str) -> None:
    dying = RolloutEngineSpec(name="dying", title="Dying", engine="sys:exit")
    with pytest.raises(EngineError, match=r"Dying cannot start: .* has ended with code 1") as raised:
        await IsolatedEngine(dying, RolloutEngineSettings("model"), python).start()
    assert not isinstance(raised.value, ProcessLostError)


async def test_the_process_ends_with_its_parent(path: str, python: str) -> None:
    program = textwrap.dedent("""
        import asyncio, sys, time
        from verl.config.rollout_engines import get_rollout_engine
        from verl.rollout.isolated.engine import IsolatedEngine
        from verl.rollout.settings import RolloutEngineSettings

        async def main():
            engine = IsolatedEngine(get_rollout_engine("hf"), RolloutEngineSettings(sys.argv[1]), sys.argv[2])
            await engine.start()
            print(engine._process.pid, flush=True)
            time.sleep(600)

        asyncio.run(main())
    """)
    parent = subprocess.Popen([sys.executable, "-c", program, path, python], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    process = psutil.Process(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs([process], timeout=30)
    assert not alive


@pytest.mark.parametrize(
    ("name", "words"),
    [("missing", "does not exist on this machine"), ("text", "cannot be started"), ("bare", "cannot import verl")],
)
async def test_an_interpreter_that_cannot_run_the_engine_is_refused(name: str, words: str, tmp_path: Path) -> None:
    python = tmp_path / name
    if name == "text":
        python.write_text("not a program")
        python.chmod(0o755)
    if name == "bare":
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
        python.chmod(0o755)
    assert words in find_interpreter_problem(str(python), HF)
    with pytest.raises(EngineError, match=rf"actor_rollout_ref\.rollout\.python: .*{words}"):
        await IsolatedEngine(HF, RolloutEngineSettings("model"), str(python)).start()


async def test_an_environment_without_what_the_engine_needs_is_refused(python: str) -> None:
    """Any function that returns a text stands for the check of an engine."""
    spec = RolloutEngineSpec(name="needy", title="Needy", engine="", find_problem="platform:system")
    assert find_interpreter_problem(python, HF) == ""
    assert find_interpreter_problem(python, spec) == f"{python}: needy Linux"
