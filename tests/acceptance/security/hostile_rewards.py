"""Whatever a reward function does, a run of 3 steps ends as promised, and nothing is left behind.

Each hostile function goes through 3 steps of scoring twice. Once it misbehaves on one response of twelve: the steps
complete, that response is left out and counted, the others have their scores. Once on every response: the run stops,
and the message names the function, the cause and the response; or all are scored, where the misdeed does not affect the
score. After each, no process, open file or thread of it is left. With `--train`, three of them do it to real runs of
`verl train`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import NoReturn

from _common import Stopwatch, finish, metrics_of, sized_for_addition, train

from verl.demo.assets import make_assets
from verl.errors import RewardError
from verl.rewards.pool import process_pool
from verl.rewards.pool.pool import RewardPool
from verl.rewards.result import Failed, FailureTracker, Scored
from verl.rewards.settings import RewardFunctionSettings

FILE = Path(__file__).with_name("_hostile_rewards.py")
STEPS, RESPONSES, LIMIT = 3, 12, 0.1
MARK = f"VERL_SHOW_{uuid.uuid4().hex}"

EXPECTED = {  # function -> (how a bad response ends, what the message says)
    "raises_key_error": ("error", "KeyError: 'gone'"),
    "raises_megabytes": ("error", "ValueError"),
    "raises_base_exception": ("error", "Stop: everything"),
    "raises_what_cannot_be_shown": ("error", "raised Odd"),
    "raises_stop_iteration": ("error", "StopIteration"),
    "recurses": ("error", "RecursionError"),
    "raises_while_async": ("error", "the judge is away"),
    "cancels_itself": ("error", "CancelledError"),
    "loops": ("timeout", "in loops"),
    "sleeps": ("timeout", "in sleeps"),
    "waits_for_a_lock": ("timeout", "in waits_for_a_lock"),
    "backtracks": ("timeout", "in backtracks"),
    "ignores_signals": ("timeout", "did not return within"),
    "blocks_signals": ("timeout", "did not return within"),
    "waits_for_its_child": ("timeout", "in waits_for_its_child"),
    "hangs_when_it_is_read": ("timeout", "in <lambda>"),
    "awaits_for_ever": ("timeout", "did not return within"),
    "blocks_the_loop": ("timeout", "in blocks_the_loop"),
    "swallows_its_cancellation": ("timeout", "did not return within"),
    "stops_its_process": ("timeout", "did not return within"),
    "exits": ("error", "SystemExit: enough"),
    "exits_at_once": ("died", "exit code 0"),
    "kills_itself": ("died", "SIGKILL"),
    "kills_its_group": ("died", "SIGKILL"),
    "kills_its_supervisor": ("died", "supervises it"),
    "stops_its_supervisor": ("timeout", "did not return within"),
    "reads_address_zero": ("died", "in reads_address_zero"),
    "aborts": ("died", "SIGABRT"),
    "becomes_another_program": ("died", "exit code 7"),
    "closes_all_files": ("died", "file descriptors"),
    "exits_while_async": ("died", "exit code 9"),
    "asks_for_a_terabyte": ("error", "reward.memory_mb"),
    "eats_memory": ("error", "reward.memory_mb"),
    "eats_shared_memory": ("died", "its limit is"),
    "leaks": ("scored", ""),
    "returns_none": ("invalid", "returned None"),
    "returns_nan": ("invalid", "returned nan"),
    "returns_infinity": ("invalid", "returned inf as 'score'"),
    "returns_text": ("invalid", "returned '1.0'"),
    "returns_a_hundred_megabytes": ("invalid", "67,108,864 characters"),
    "returns_a_list": ("invalid", "returned [1.0]"),
    "returns_a_number_too_large": ("invalid", "returned 1000000"),
    "returns_a_dict_without_score": ("invalid", "without 'score' (its keys: 'acc')"),
    "returns_a_huge_dict": ("invalid", "200,001 keys"),
    "returns_what_has_no_repr": ("invalid", "without a repr"),
    "prints_a_flood": ("scored", ""),
    "floods_for_ever": ("timeout", "in floods_for_ever"),
    "forks_and_both_return": ("scored", ""),
    "leaves_a_daemon": ("scored", ""),
    "leaves_a_stubborn_daemon_and_dies": ("died", "exit code 5"),
    "leaves_many_children": ("scored", ""),
    "changes_directory": ("scored", ""),
    "clears_the_environment": ("scored", ""),
    "patches_modules": ("scored", ""),
    "patches_builtins": ("scored", ""),
    "forgets_modules": ("scored", ""),
    "forgets_an_alarm": ("scored", ""),
    "leaves_a_busy_thread": ("scored", ""),
}

AT_IMPORT = {  # body of a module -> what the message at the start says
    "import nothing_of_this_name": "imports 'nothing_of_this_name'",
    "1 / 0": "ZeroDivisionError",
    "import os; os._exit(3)": "exit code 3",
    "import time; time.sleep(3600)": "took more than 5 s",
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "SIGSEGV",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="every fourth function")
    parser.add_argument(
        "--train", action="store_true", help="real runs: three functions, each sometimes and always bad"
    )
    parser.add_argument("--only", help="one function")
    parser.add_argument("--deadline", type=float, default=4.0, help="seconds for the calls that hang")
    arguments = parser.parse_args()
    os.environ[MARK] = "1"
    if arguments.train:
        train_with_them(arguments.deadline)
    names = [arguments.only] if arguments.only else list(EXPECTED)[:: 4 if arguments.short else 1]
    watch, wrong = Stopwatch(), {}
    for name in names:
        start, before = time.monotonic(), own_files()
        problems = asyncio.run(try_out(name, arguments.deadline))
        if left := left_behind():
            problems.append(f"left behind: {left}")
        if own_files() != before:
            problems.append(f"{before} open files became {own_files()}")
        print(
            f"{name:36} {EXPECTED[name][0]:8} {time.monotonic() - start:5.1f} s  {'; '.join(problems) or 'as promised'}"
        )
        if problems:
            wrong[name] = problems
    modules = {} if arguments.only else AT_IMPORT
    for body, part in modules.items():
        problems = asyncio.run(try_to_load(body, part))
        print(f"{'at its import: ' + body[:40]:56}  {'; '.join(problems) or 'as promised'}")
        if problems:
            wrong[body] = problems
    finish(
        "hostile_rewards",
        not wrong,
        functions=len(names) + len(modules),
        steps=STEPS,
        as_promised=len(names) + len(modules) - len(wrong),
        processes_left=len(left_behind()),
        threads_left=threading.active_count() - 1,
        seconds=round(watch.seconds(), 1),
        wrong=sorted(wrong),
    )


async def try_out(name: str, deadline_s: float) -> list[str]:
    kind, part = EXPECTED[name]
    problems = []
    deadline_s = deadline_s if kind == "timeout" else 60.0
    pool = RewardPool(RewardFunctionSettings(str(FILE), name, workers=2, timeout_s=deadline_s, memory_mb=512))
    try:
        await pool.start()
        problems += await misbehaves_sometimes(pool, kind)
        problems += await misbehaves_always(pool, kind, f"{FILE}:{name}", part)
    finally:
        pool.close()
    return problems


async def misbehaves_sometimes(pool: RewardPool, kind: str) -> list[str]:
    """The run goes on, the bad response is counted, the good ones keep their scores."""
    problems = []
    tracker = FailureTracker(LIMIT, RESPONSES)
    for step in range(STEPS):
        responses = ["right", "bad", *["wrong", "right"] * 5]
        outcomes = await asyncio.gather(*(pool.score("show", response, "right") for response in responses))
        try:
            for outcome in outcomes:
                tracker.add(outcome)
        except RewardError as error:
            return [f"step {step}: {error}"]
        rates = tracker.end_step()
        expected = [Scored(float(response == "right")) for response in responses]
        if [outcome for index, outcome in enumerate(outcomes) if index != 1] != [expected[0], *expected[2:]]:
            failed = next((outcome.message for outcome in outcomes if isinstance(outcome, Failed)), outcomes)
            problems.append(f"step {step}: responses that are not bad have no score: {failed}")
        found = outcomes[1].kind if isinstance(outcomes[1], Failed) else "scored"
        if found != kind:
            problems.append(f"step {step}: {found} and not {kind}: {outcomes[1]}")
        late = sum(rates.values()) if kind == "timeout" else 0.0
        if rates["reward/timeout_rate"] != late or sum(rates.values()) != (kind != "scored") / RESPONSES:
            problems.append(f"step {step}: counted as {rates}")
    return problems


async def misbehaves_always(pool: RewardPool, kind: str, where: str, part: str) -> list[str]:
    """The run stops and says why; or nothing is lost."""
    tracker = FailureTracker(LIMIT, RESPONSES)
    calls = [asyncio.ensure_future(pool.score("show", f"bad {number}", "right")) for number in range(RESPONSES)]
    try:
        for call in asyncio.as_completed(calls):
            tracker.add(await call)
    except RewardError as error:
        message = str(error)
        missing = [text for text in (where, part, "'bad ", f"max_failure_rate={LIMIT}") if text not in message]
        if kind == "scored" or missing or len(message) > 10_000:
            return [f"stopped with {len(message)} characters, without {missing}: {message}"]
        return []
    finally:
        for call in calls:
            call.cancel()
    return [] if kind == "scored" else ["every response was bad, and the run was not stopped"]


async def try_to_load(body: str, part: str) -> list[str]:
    process_pool.LOAD_TIMEOUT_S = 5.0 if part.startswith("took more") else 300.0
    with tempfile.TemporaryDirectory(prefix="verl-hostile-") as folder:
        file = Path(folder) / "my_reward.py"
        file.write_text(
            f"{body}\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n"
        )
        with RewardPool(RewardFunctionSettings(str(file))) as pool:
            try:
                await pool.start()
            except RewardError as error:
                return [] if part in str(error) and str(file) in str(error) else [str(error)]
    return ["it was loaded"]


def train_with_them(deadline_s: float) -> NoReturn:
    """Real runs of 3 steps: with a fifth of the prompts bad they end and count; with all of them bad they say why."""
    wrong = {}
    watch = Stopwatch()
    with tempfile.TemporaryDirectory(prefix="verl-hostile-") as directory:
        folder = Path(directory)
        make_assets(folder)
        for name in ("sleeps", "exits_at_once", "returns_nan"):
            kind, part = EXPECTED[name]
            code, shown, metrics = run(folder, name, 5, deadline_s)
            rate = "reward/timeout_rate" if kind == "timeout" else "reward/error_rate"
            if code != 0 or len(metrics) != STEPS or not any(line[rate] > 0 for line in metrics):
                wrong[f"{name}, sometimes"] = f"exit code {code}, {rate}: {[line.get(rate) for line in metrics]}"
            code, shown, _ = run(folder, name, 1, deadline_s)
            if code == 0 or part not in shown or f"{FILE}:{name}" not in shown:
                wrong[f"{name}, always"] = f"exit code {code}, {part!r} shown: {part in shown}"
            if left := left_behind():
                wrong[f"{name}, left behind"] = str(left)
    finish("hostile_rewards", not wrong, runs=6, steps=STEPS, seconds=round(watch.seconds(), 1), wrong=wrong)


def run(folder: Path, name: str, every: int, deadline_s: float) -> tuple[int, str, list[dict[str, float]]]:
    """(exit code, what was shown, the metrics of its steps)."""
    shown = io.StringIO()
    output = folder / f"{name}-{every}"
    with contextlib.redirect_stdout(shown):
        code, _ = train(
            *sized_for_addition(folder),
            f"trainer.default_local_dir={output}",
            "actor_rollout_ref.rollout.name=hf",
            "data.train_batch_size=10",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=10",
            f"reward.custom_reward_function.path={FILE}",
            f"reward.custom_reward_function.name={name}",
            f"+reward.custom_reward_function.reward_kwargs.every={every}",
            "reward.reward_manager.name=prime",
            "reward.num_workers=4",
            f"reward.deadline_s={deadline_s if EXPECTED[name][0] == 'timeout' else 60}",
            "reward.max_failure_rate=0.6",
            f"trainer.total_training_steps={STEPS}",
            "trainer.save_freq=-1",
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            deadline_s=600,
        )
    print(shown.getvalue())
    metrics = [line for line in metrics_of(output) if "reward/mean" in line] if code == 0 else []
    return code, shown.getvalue(), metrics


def left_behind() -> list[str]:
    """All processes of this machine that come from here, whatever they became: by their environment and by descent."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                environment = (folder / "environ").read_bytes()
                status = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if MARK.encode() in environment or int(status[1]) == os.getpid() or command == "sleep 3600 ":
                found.append(f"{folder.name} {command}")
    return found


def own_files() -> int:
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    main()
