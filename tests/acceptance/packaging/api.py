"""Run every snippet of docs/python_api.md and of the usage patterns, and the example notebook.

Each page or pattern is a script in a separate process, with real Ray, FSDP2 and vLLM. Only the names of models that
would be downloaded are replaced by a tiny local one. The first example must learn: the mean reward of its last step
must be at least `RISE` above that of its first. A debugger must stop inside a user's reward function in a run with
`local=True` and print a local variable.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import ROOT, Stopwatch, finish  # isort: skip - puts tests/ on the path
from _patterns import GRPO, PPO, WORKERS

NOTEBOOK = ROOT / "examples/grpo/train_from_python.ipynb"
RISE = 0.5
DEADLINE_S = 1800
DOWNLOADS = ("Qwen/Qwen2.5-0.5B-Instruct", "meta-llama/Llama-2-7b-hf")
ROWS = """\
import torch
truths = [dict(ground_truth=f"{2 * n:03d}") for n in range(8)]
rows = [dict(prompt=f"{n}+{n}=", data_source="addition", reward_model=truths[n]) for n in range(8)]
train_dataloader = torch.utils.data.DataLoader(rows, batch_size=4)
"""
LOOP = """\
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
prompts, num_epochs = rows, 2
"""
DEBUGGED = """\
from verl import GRPOTrainer, TrainingConfig


def reward(prompt, response, ground_truth):
    secret = f"the truth is {ground_truth}"
    return float(len(response))


config = TrainingConfig(batch_size=1, total_steps=1, group_size=2, max_prompt_length=8, max_response_length=4)
rows = [{"prompt": "1+1=", "ground_truth": "002"}]
GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", reward=reward, prompts=rows, config=config, local=True).train()
print("trained to the end")
"""
DEBUGGER = "break {script}:6\ncontinue\np secret\nclear 1\ncontinue\nquit\n"


def make_model(folder: Path) -> Path:
    """Create a tiny model in place of a large one; one token in eight ends a response, so that responses are short."""
    from transformers import GenerationConfig

    from verl.demo.assets import make_assets

    model = make_assets(folder).model
    GenerationConfig(eos_token_id=list(range(1, 33))).save_pretrained(model)
    return model


def run(name: str, text: str, folder: Path, model: Path, *, debugger: str = "") -> tuple[bool, str]:
    """Run a script in a separate process; return whether it succeeded, and its output."""
    home = folder / name
    home.mkdir()
    for download in DOWNLOADS:
        text = text.replace(download, str(model))
    script = home / "script.py"
    script.write_text(text)
    return execute(name, [*(["-m", "pdb"] if debugger else []), script], home, debugger.format(script=script))


def execute(name: str, command: list[str | Path], folder: Path, typed: str = "") -> tuple[bool, str]:
    """Run Python with a command line; return whether it succeeded, and its output."""
    watch = Stopwatch()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        input=typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    print(f"{name}: exit {done.returncode} after {watch.seconds():.0f} s", flush=True)
    if done.returncode:
        print(done.stdout[-4000:], flush=True)
    return done.returncode == 0, done.stdout


def reward_of(printed: str) -> tuple[float, float]:
    """The reward of the first and of the last step, as the ten lines print them."""
    match = re.search(r"reward ([\d.]+) -> ([\d.]+); the model is in", printed)
    return (float(match[1]), float(match[2])) if match else (0.0, 0.0)


def snippets() -> list[str]:
    """The Python of the page, block by block."""
    page = (ROOT / "docs" / "python_api.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="the same: CI runs every snippet")
    parser.parse_args()
    page, passed, watch = snippets(), {}, Stopwatch()
    with tempfile.TemporaryDirectory(prefix="verl-api-") as directory:
        folder = Path(directory)
        model = make_model(folder / "assets")
        passed["docs/python_api.md"], printed = run("page", "\n".join(page), folder, model)
        first, last = reward_of(printed)
        passed["the ten lines learn"] = last - first >= RISE
        command = [ROOT / "tests/run_notebook.py", NOTEBOOK, f"{DOWNLOADS[0]}={model}"]
        ran, printed = execute("notebook", command, folder)
        before, after = reward_of(printed)
        passed["the notebook learns"] = ran and after > before
        passed["PPOTrainer and GRPOTrainer"], _ = run("trainers", ROWS + PPO + GRPO, folder, model)
        passed["RolloutWorker and TrainerWorker"], _ = run("workers", ROWS + LOOP + WORKERS, folder, model)
        stopped, printed = run("breakpoint", DEBUGGED, folder, model, debugger=DEBUGGER)
        passed["a breakpoint in a reward"] = (
            stopped and "'the truth is 002'" in printed and "trained to the end" in printed
        )
    figures = {"snippets": len(page) + 3, "reward_before": first, "reward_after": last, "rise_asked": RISE}
    finish("api", all(passed.values()), **figures, seconds=round(watch.seconds()), **passed)


if __name__ == "__main__":
    main()
