"""Meet verl as a new user does: mistakes, data that must survive, signals, silence, and what a run says at its end.

make show-first-contact [ARGS="[--short] [--results DIR] [--only NAME]"]

Each case is a session in a terminal of 120 columns, recorded in `--results` (first-contact-results). `--short` (CI)
has the cases that start neither Ray nor vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from _common import finish
from _terminal import Session, record

VERL = [sys.executable, "-m", "verl"]
MAX_SILENCE_S = 2.0
"""Between the first output and the last; longer in proportion to the load, if other programs use the cores."""
GRPO = """
import sys
from verl import GRPOTrainer, TrainingConfig

def reward(response: str) -> float:
    return float(len(response))

config = TrainingConfig(batch_size=2, group_size=2, total_steps=1, max_prompt_length=8, max_response_length=4, {more})
result = GRPOTrainer("assets/model", reward=reward, prompts=["1+1=", "2+2="], config=config, local=True).train()
print("model:", result.model_path)
"""
AGENTS = """
import sys

import verl
from openai import AsyncOpenAI
from verl import GRPOTrainer, TrainingConfig

@verl.tool
def price(fruit: str) -> str:
    'Return the price of a fruit.'
    return "7"

async def agent(task, base_url, api_key):
    messages = list(task.messages)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(9):  # more than the tokens of a response allow
            reply = await client.chat.completions.create(model="policy", messages=messages)
            messages += [dict(role="assistant", content=reply.choices[0].message.content), messages[0]]
    return 1.0

def reward(response: str) -> float:
    return float(len(response))

settings = {"actor_rollout_ref.rollout.multi_turn.format": "hermes"}
sizes = dict(batch_size=2, group_size=2, max_prompt_length=8, max_response_length=4)
config = TrainingConfig(total_steps=1, settings=settings, **sizes)
prompts = [dict(prompt=[dict(role="user", content=text)]) for text in ("1+1=", "2+2=")]
how = dict(tools=[price], reward=reward) if sys.argv[1:] == ["tools"] else dict(agent=agent)
GRPOTrainer("assets/model", prompts=prompts, config=config, local=True, **how).train()
"""
LOCAL = [
    *("data.train_files=assets/train.parquet", "model.path=assets/model", "rollout.name=hf", "trainer.local=True"),
    *("data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "rollout.n=2", "data.max_prompt_length=8"),
    *("data.max_response_length=4", "trainer.total_training_steps=1", "trainer.n_gpus_per_node=1"),
]
SFT = [
    *("sft", "data.train_files=assets/sft.parquet", "data.prompt_key=prompt", "data.response_key=response"),
    *("model.path=assets/model", "data.train_batch_size=64", "data.micro_batch_size_per_gpu=16"),
    *("trainer.n_gpus_per_node=1", "trainer.total_epochs=100"),
]


@dataclass(slots=True)
class Trial:
    """A user's folder, and where the sessions are recorded."""

    folder: Path
    results: Path
    silences: dict[str, float] = field(default_factory=dict)

    def run(self, name: str, *arguments: str, **options: object) -> Session:
        """Run `verl` with these arguments."""
        return self.record(name, [*VERL, *arguments], **options)

    def python(self, name: str, program: str, *arguments: str) -> Session:
        """Run a program of the user."""
        (self.folder / f"{name}.py").write_text(program)
        return self.record(name, [sys.executable, f"{name}.py", *arguments])

    def record(self, name: str, command: list[str], **options: object) -> Session:
        session = record(command, self.folder, log=self.results / f"{name}.txt", **options)  # type: ignore[arg-type]
        self.silences[name] = round(session.longest_silence_s, 1)
        return session


def lists_all_wrong_paths(trial: Trial) -> bool:
    session = trial.run(
        "wrong_paths",
        *("train", "data.train_files=capitls.parquet", "model.path=./no/model", "rollout.n=4"),
        *("reward.custom_reward_function.path=my_rewrd.py", "trainer.default_local_dir=/proc/run"),
    )
    named = ("capitls.parquet", "./no/model", "my_rewrd.py", "trainer.default_local_dir=/proc/run: cannot be written")
    return session.code == 2 and all(text in session.text for text in named) and "sizes of a step" not in session.text


def hints_at_foreign_options(trial: Trial) -> bool:
    session = trial.run("foreign_options", "train", "--check", "--lr", "1e-5", "--output_dir=out")
    said = ("run `verl doctor` with the same settings", "set optim.lr=", "set trainer.default_local_dir=")
    return session.code == 2 and all(text in session.text for text in said)


def names_the_model_of_a_plan(trial: Trial) -> bool:
    session = trial.run("plan", "plan")
    return session.code == 2 and "???" not in session.text and "actor_rollout_ref.model.path: must be" in session.text


def hints_at_a_destructive_learning_rate(trial: Trial) -> bool:
    return "far above usual learning rates" in trial.run("learning_rate", "config", "optim.lr=1e3", "rollout.n=8").text


def prints_no_hints_for_short_names(trial: Trial) -> bool:
    session = trial.run("short_names", "config", "rollout.n=8", "model.path=org/model", "actor.optim.lr=1e-6")
    return session.code == 0 and "alias" not in session.text


def reports_mistakes_from_python_in_few_lines(trial: Trial) -> bool:
    session = trial.python("python_mistake", GRPO.format(more='settings={"trainer.sed": 3}'))
    lines = [line for line in session.text.splitlines() if line.strip() and not re.match("[\u2800-\u28ff]", line)]
    return "did you mean trainer.seed" in session.text and len(lines) < 12  # without the frames of the spinner


def keeps_the_run_of_an_earlier_program(trial: Trial) -> bool:
    first, second = (trial.python(f"python_run_{index}", GRPO.format(more=f"seed={index}")) for index in (1, 2))
    kept, new = (trial.folder / name / "global_step_1" for name in ("verl-run", "verl-run-2"))
    is_said = "verl-run holds the checkpoints of another run, which are kept" in second.text
    return first.code == second.code == 0 and kept.is_dir() and new.is_dir() and is_said


def starts_over_in_a_new_folder(trial: Trial) -> bool:
    """The command line saves the model at the end, says what is next, and starts over elsewhere."""
    run = ["train", *LOCAL, "trainer.default_local_dir=cli"]
    first, second = trial.run("train", *run), trial.run("train_again", *run, "trainer.resume_mode=disable")
    models = [*trial.folder.glob("cli*/global_step_1/actor/huggingface/model.safetensors")]
    said = ("verl merge cli --target_dir merged", "verl generate", "verl eval responses.parquet", "metrics.jsonl")
    is_next = all(text in first.text for text in said)
    return first.code == second.code == 0 and len(models) == 2 and is_next and "writes to cli-2" in second.text


def says_that_nothing_is_saved(trial: Trial) -> bool:
    session = trial.run("unsaved", "train", *LOCAL, "trainer.save_freq=-1", "trainer.default_local_dir=unsaved")
    is_said = "nothing will be saved" in session.text and "so the trained model is gone" in session.text
    return session.code == 0 and is_said


def shows_phases_within_120_columns(trial: Trial) -> bool:
    """Uses the step line of `starts_over_in_a_new_folder`."""
    text = (trial.results / "train.txt").read_text()
    lines = [line for line in text.splitlines() if re.match(r"step\s+1/1\b", line)]
    words = ("reward", "generate", "train", "sync", "total", "s ")
    return len(lines) == 1 and len(lines[0]) <= 120 and all(word in lines[0] for word in words)


def takes_run_folders_for_checkpoints(trial: Trial) -> bool:
    """Uses the run of `starts_over_in_a_new_folder`."""
    merged = trial.run("merge", "merge", "cli", "--target_dir", "merged")
    evaluated = trial.run("eval_checkpoint", "eval", "cli")
    is_merged = merged.code == 0 and (trial.folder / "merged" / "model.safetensors").is_file()
    return is_merged and evaluated.code == 2 and "generate them first: verl generate" in evaluated.text


def stores_scores_and_lists_failures(trial: Trial) -> bool:
    rows = [{"data_source": "addition", "ground_truth": "4", "responses": ["4", "5", None]}]
    pq.write_table(pa.Table.from_pylist(rows), trial.folder / "responses.parquet")
    session = trial.run("eval", "eval", "responses.parquet", "reward.max_failure_rate=0.5")
    scores = [json.loads(line) for line in (trial.folder / "responses.scores.jsonl").read_text().splitlines()]
    is_listed = "1 x " in session.text and "no response" in session.text
    return session.code == 0 and [score.get("score") for score in scores] == [1.0, 0.0, None] and is_listed


def imports_modules_next_to_a_reward_file(trial: Trial) -> bool:
    (trial.folder / "mine").mkdir()
    (trial.folder / "mine" / "helper.py").write_text("def grade(text):\n    return float(len(text))\n")
    reward = "from helper import grade\n\ndef compute_score(solution_str, **_):\n    return grade(solution_str)\n"
    (trial.folder / "mine" / "reward.py").write_text(reward)
    where = "reward.custom_reward_function.path=mine/reward.py"
    return trial.run("imports", "train", *LOCAL, where, "trainer.default_local_dir=imports").code == 0


def refuses_a_template_that_hides_tools(trial: Trial) -> bool:
    session = trial.python("hidden_tools", AGENTS, "tools")
    said = ("the chat template of", "does not show the model its tools: price", "Use a model whose chat template has")
    return session.code == 1 and all(text in " ".join(session.text.split()) for text in said)


def ends_an_agent_whose_tokens_are_used_up(trial: Trial) -> bool:
    session = trial.python("budget", AGENTS)
    is_clean = "Traceback" not in session.text and "returned no score" not in session.text
    return session.code == 0 and is_clean


def advises_on_ranks_that_share_cores(trial: Trial) -> bool:
    """Says so before it starts as many processes."""
    ranks = (os.cpu_count() or 1) * 4
    advice = f"{ranks} train ranks share its"
    session = trial.run(
        *("cores", "train", *LOCAL, "trainer.local=False", f"trainer.n_gpus_per_node={ranks}"),
        *(f"data.train_batch_size={ranks}", f"actor.ppo_mini_batch_size={ranks}", "trainer.default_local_dir=cores"),
        interrupt_after=advice,
    )
    return session.code == 130 and "set trainer.n_gpus_per_node=1" in session.text


def saves_on_sigterm_to_the_group(trial: Trial) -> bool:
    command = ["timeout", "--signal=TERM", "90", *VERL, *SFT, "trainer.default_local_dir=sft"]
    session = trial.record("sigterm", command)
    is_saved = (
        "saved and stopped after step" in session.text and "the last checkpoint is sft/global_step_" in session.text
    )
    return is_saved and "Traceback" not in session.text


def names_the_checkpoint_after_ctrl_c(trial: Trial) -> bool:
    """Resumes what `saves_on_sigterm_to_the_group` has saved."""
    session = trial.run("ctrl_c", *SFT, "trainer.default_local_dir=sft", interrupt_after="continuing with step")
    said = ("the last checkpoint is sft/global_step_", "to resume:", "verl sft data.train_files=assets/sft.parquet")
    return session.code == 130 and all(text in session.text for text in said) and "Traceback" not in session.text


def shows_progress_and_a_fair_sample_in_the_demo(trial: Trial) -> bool:
    session = trial.run("demo", "demo", "--steps", "3", timeout_s=900.0)
    stages = ("starting the rollout engines", "warming up", "generating ", " responses", "validating ")
    is_fair = re.search(r"of \d+ held-out problems \d+ turned right, \d+ turned wrong; a sample", session.text)
    lines = [line for line in session.text.splitlines() if re.match(r"step\s+\d/3\b", line)]
    fits = len(lines) == 3 and all(len(line) <= 120 and "sync" in line for line in lines)
    return session.code == 0 and all(stage in session.text for stage in stages) and bool(is_fair) and fits


def generates_from_a_run_with_progress(trial: Trial) -> bool:
    """Uses the run of `starts_over_in_a_new_folder`."""
    session = trial.run(
        *("generate", "generate", "assets/test.parquet", "--output", "new.parquet", "model.path=cli"),
        *("data.max_response_length=4", "trainer.n_gpus_per_node=1"),
    )
    progress = re.search(r"generating +\w+ .*\d+ of \d+ prompts", session.text)
    return session.code == 0 and (trial.folder / "new.parquet").is_file() and bool(progress)


Case = Callable[[Trial], bool]
SHORT: tuple[Case, ...] = (
    lists_all_wrong_paths,
    hints_at_foreign_options,
    names_the_model_of_a_plan,
    hints_at_a_destructive_learning_rate,
    prints_no_hints_for_short_names,
    reports_mistakes_from_python_in_few_lines,
    keeps_the_run_of_an_earlier_program,
    starts_over_in_a_new_folder,
    shows_phases_within_120_columns,
    says_that_nothing_is_saved,
    takes_run_folders_for_checkpoints,
    stores_scores_and_lists_failures,
    imports_modules_next_to_a_reward_file,
    refuses_a_template_that_hides_tools,
    ends_an_agent_whose_tokens_are_used_up,
)
WITH_ENGINES: tuple[Case, ...] = (
    saves_on_sigterm_to_the_group,
    names_the_checkpoint_after_ctrl_c,
    shows_progress_and_a_fair_sample_in_the_demo,
    generates_from_a_run_with_progress,
    advises_on_ranks_that_share_cores,
)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # sessions are interrupted, also if a shell ignores it
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="only the cases without Ray and vLLM")
    parser.add_argument("--results", type=Path, default=Path("first-contact-results"), help="folder of the sessions")
    parser.add_argument("--only", help="the case with this name alone")
    options = parser.parse_args()
    cases = SHORT if options.short else SHORT + WITH_ENGINES
    results = options.results.absolute()
    results.mkdir(parents=True, exist_ok=True)
    trial = Trial(results / "folder", results)
    shutil.rmtree(trial.folder, ignore_errors=True)
    make_assets(trial.folder / "assets")
    failed = []
    for case in cases:
        if options.only in (None, case.__name__):
            passed = case(trial)
            failed += [] if passed else [case.__name__]
            print(f"{'passed' if passed else 'FAILED'}  {case.__name__.replace('_', ' ')}", flush=True)
    busy = max(1.0, os.getloadavg()[1] / (os.cpu_count() or 1))  # of 1 on an idle machine
    engines = {name: trial.silences[name] for name in ("sigterm", "demo", "generate") if name in trial.silences}
    longest = max(engines.values(), default=0.0)
    is_quiet = longest > MAX_SILENCE_S * busy
    finish(
        "first_contact",
        not failed and not is_quiet,
        cases=len(cases),
        failed=failed,
        longest_silence_s=longest,
        silences_s=engines,
        load_per_core=round(busy, 1),
        recorded=str(results),
    )


def make_assets(folder: Path) -> None:
    """Write a tiny model, prompts, and examples for supervised fine-tuning."""
    from verl.demo.assets import make_assets, read_problems

    assets = make_assets(folder)
    rows = [{"prompt": prompt, "response": answer} for prompt, answer in read_problems(assets.train)[:640]]
    pq.write_table(pa.Table.from_pylist(rows), folder / "sft.parquet")


if __name__ == "__main__":
    main()
