"""Megatron-Core trains as FSDP2 does, whatever the layout, and a run with it goes on when a rank is killed.

make show-megatron [ARGS="--short --families Qwen3-MoE"]

1. On 4 gloo ranks, in every layout of tensor, pipeline, data, expert and context parallel ranks, with random
   micro-batches, against FSDP2 on 1 rank and the unsplit mini-batch: the gradient of every policy, value, entropy and
   KL term that Megatron-Core has by ||g - g0|| / ||g0||, every metric, and the weights after 5 updates: <= 1e-5. Actors
   and critics of Qwen2, Qwen3, Llama 3 and Qwen3-MoE.
2. Checkpoints of 3 updates, saved on tensor x pipeline (x expert) ranks, are resumed by Megatron-Core on 1 rank and by
   FSDP2, and one of FSDP2 on those ranks: tensors equal to the bit, and two more updates as if nothing had happened.
3. `verl merge --backend megatron` of a checkpoint of the train workers equals the weights that the ranks held, bit by
   bit, and so does the model that `trainer.save_hf` wrote.
4. GRPO with Ray and vLLM on 2 ranks, one of which is killed after the second step: every step is trained, and trainer
   and engine agree to 1e-4 on every token. With tensor parallel ranks; the full form also has pipeline stages, and
   expert parallel ranks of an MoE.
5. `verl sft` on 2 tensor parallel ranks has the losses of FSDP2 to 1e-5 (not in the short form).

Megatron-Core runs on the CPU here, by the stand-in for CUDA in `tests/cuda_stand_in.py`. `--short` (CI): fewer terms,
runs and steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from _common import ROOT, finish, metrics_of, short_grpo, skip, train
from safetensors.torch import load_file

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # until `_megatron_ranks` removes it
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # for workers of Ray

from _megatron_ranks import (
    ALL_TERMS,
    FAMILIES,
    RANKS,
    STEP,
    compute_reference,
    rank_main,
    resume_with_fsdp,
    save_models,
    worst,
)
from ranks import free_port, run_ranks
from tiny import tiny_family, tiny_qwen2
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from verl.demo.assets import make_assets, make_tokenizer, read_problems

LIMIT, PARITY = 1e-5, 1e-4
METRIC = "training/rollout_logprobs_diff_max"
MARK = "VERL_SHOW_MEGATRON"
RUNS = {
    "tensor": ("Qwen2", {"tensor_model_parallel_size": 2}),
    "pipeline": ("Qwen2", {"pipeline_model_parallel_size": 2}),
    "expert": ("Qwen3-MoE", {"expert_model_parallel_size": 2}),
}
SFT_FAMILY = "Qwen2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--parts", default="ranks,runs,sft", help="ranks: 1 to 3; runs: 4; sft: 5")
    parser.add_argument("--families", default=",".join(FAMILIES), help="parts of these families alone")
    options = parser.parse_args()
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        skip("megatron", "Megatron-Core is not installed: pip install --no-deps megatron-core==0.16.1")
    disable_progress_bar()
    parts, families, start = options.parts.split(","), options.families.split(","), time.monotonic()
    figures: dict[str, Any] = {}
    passed = []
    with tempfile.TemporaryDirectory(prefix="verl-megatron-") as directory:
        if "ranks" in parts:
            found, right = compare_ranks(Path(directory), families, short=options.short)
            figures, passed = figures | found, [*passed, right]
        if "runs" in parts:
            names = [name for name, (family, _) in RUNS.items() if family in families]
            for name in names[:1] if options.short else names:
                found, right = run_with_a_kill(Path(directory) / f"run-{name}", name, steps=3 if options.short else 5)
                figures, passed = figures | {f"run_{name}": found}, [*passed, right]
        if "sft" in parts and SFT_FAMILY in families and not options.short:
            gap = compare_sft(Path(directory) / "sft")
            figures, passed = figures | {"worst_sft_loss": gap}, [*passed, gap <= LIMIT]
    figures |= {"allowed": LIMIT, "allowed_parity": PARITY, "seconds": round(time.monotonic() - start, 1)}
    finish("megatron", bool(passed) and all(passed), **figures)


def compare_ranks(directory: Path, families: list[str], *, short: bool) -> tuple[dict[str, Any], bool]:
    """Compare layouts, checkpoints and merged models."""
    save_models(directory, families)
    compute_reference(directory, families)
    with_terms = [family for family in families if family in ALL_TERMS]
    ports = [free_port() for _ in range(1 + len(with_terms))]
    run_ranks(rank_main, RANKS, ports, directory, families, 16 if short else 1, deadline_s=3600)
    results = json.loads((directory / "results.json").read_text())
    resumed = results["resumed"] | resume_with_fsdp(directory, families)
    merged = {family: compare_merged(directory / family) for family in with_terms}
    for name, each in (resumed | merged).items():
        print(f"{name}: {each}", flush=True)
    kinds = ("outputs", "gradients", "losses", "weights")
    gaps = {kind: worst(results[kind].values()) for kind in kinds}
    gaps["resumed"] = worst(each[kind] for each in resumed.values() for kind in ("losses", "weights"))
    changed = sum(each["changed"] for each in resumed.values())
    figures = {
        "families": families,
        "layouts": sum(len(FAMILIES[family]) for family in families),
        **{f"{kind}_compared": len(results[kind]) for kind in kinds},
        **{f"worst_{kind}": gap for kind, gap in gaps.items()},
        "checkpoints_resumed": len(resumed),
        "tensors_changed_by_resuming": changed,
        "merged_to_the_bit": sum(each["merged"] and each["saved_along"] for each in merged.values()),
    }
    right = all(each["merged"] and each["saved_along"] and each["moved"] for each in merged.values())
    return figures, max(gaps.values()) <= LIMIT and changed == 0 and right


def compare_merged(folder: Path) -> dict[str, bool]:
    """Merge the checkpoint of a worker with the command, and compare it with the weights of the ranks."""
    actor, target = folder / "run" / f"global_step_{STEP}" / "actor", folder / "merged"
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "megatron"]
    command += ["--local_dir", str(actor), "--target_dir", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    print(done.stdout + done.stderr, end="")
    held = torch.load(folder / "held.pt", weights_only=True)
    return {
        "merged": done.returncode == 0 and are_equal(load_file(target / "model.safetensors"), held),
        "saved_along": are_equal(load_file(actor / "huggingface" / "model.safetensors"), held),
        "moved": not are_equal(load_file(folder / "actor" / "model.safetensors"), held),
    }


def are_equal(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == others.keys() and all(torch.equal(each, others[name]) for name, each in tensors.items())


def run_with_a_kill(folder: Path, name: str, *, steps: int) -> tuple[dict[str, Any], bool]:
    """Train on 2 ranks, of which one is killed after the second step; the run continues from a checkpoint."""
    os.environ[MARK] = uuid.uuid4().hex
    family, sizes = RUNS[name]
    make_assets(folder)
    save_model(folder / "model", family)
    killed: list[int] = []
    threading.Thread(target=kill_rank, args=(folder / "run", killed), daemon=True).start()
    actor = "actor_rollout_ref.actor"
    code, watch = train(
        *short_grpo(folder, prompts=16, steps=steps),
        f"{actor}.strategy=megatron",
        *(f"{actor}.megatron.{key}={value}" for key, value in sizes.items()),
        f"{actor}.megatron.dtype=float32",
        f"{actor}.use_kl_loss=True",
        "actor_rollout_ref.model.external_lib=tests.megatron_on_cpu",
        "actor_rollout_ref.rollout.num_engines=1",
        "trainer.save_freq=1",
        "trainer.max_ckpts_to_keep=2",
        deadline_s=1800,
    )
    lines = [line for line in metrics_of(folder / "run") if METRIC in line] if code == 0 else []
    trained = Counter(line["step"] for line in lines)
    figures = {
        "exit_code": code,
        "killed": len(killed),
        "steps": dict(sorted(trained.items())),
        "parity": worst(line[METRIC] for line in lines),
        "seconds": round(watch.seconds(), 1),
    }
    has_all = sorted(trained) == list(range(1, steps + 1))
    return figures, code == 0 and has_all and len(killed) == 1 and figures["parity"] <= PARITY


def compare_sft(folder: Path) -> float:
    """Return the largest difference of a loss between `verl sft` with Megatron-Core and with FSDP2."""
    assets = make_assets(folder)
    save_model(assets.model, SFT_FAMILY)
    rows = [{"prompt": prompt, "response": answer} for prompt, answer in read_problems(assets.train)[:160]]
    pq.write_table(pa.Table.from_pylist(rows), folder / "examples.parquet")
    losses = {}
    for engine in ("fsdp2", "megatron"):
        command = [sys.executable, "-m", "verl", "sft", f"data.train_files={folder / 'examples.parquet'}"]
        command += [f"model.path={assets.model}", f"model.strategy={engine}", "data.train_batch_size=32"]
        command += ["model.external_lib=tests.megatron_on_cpu", "trainer.n_gpus_per_node=2", "optim.lr=1e-3"]
        command += ["trainer.total_epochs=1", "trainer.save_freq=-1", "trainer.logger=[console]", "optim.eps=1e-3"]
        command += [f"trainer.default_local_dir={folder / engine}"]
        if engine == "megatron":
            command += ["model.megatron.tensor_model_parallel_size=2", "model.megatron.dtype=float32"]
        subprocess.run(command, cwd=ROOT, check=True, timeout=600)
        losses[engine] = [line["train/loss"] for line in metrics_of(folder / engine) if "train/loss" in line]
    print(f"losses of SFT: {losses}", flush=True)
    return worst(abs(a - b) for a, b in zip(losses["megatron"], losses["fsdp2"], strict=True))


def save_model(folder: Path, family: str) -> None:
    """Replace the model of the demo by one whose key-value heads can be split."""
    tokenizer = make_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer),
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = tiny_qwen2(**sizes) if family == "Qwen2" else tiny_family(family, **sizes, bos_token_id=None)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def kill_rank(run: Path, killed: list[int]) -> None:
    """Kill a train worker once two steps are done."""
    file = run / "metrics.jsonl"
    while not file.exists() or sum(METRIC in line for line in file.read_text().splitlines()) < 2:
        time.sleep(0.2)
    for process in psutil.process_iter():
        try:
            is_rank = "ray::TrainWorker" in " ".join(process.cmdline())
            if is_rank and process.environ().get(MARK) == os.environ[MARK]:
                process.kill()
                killed.append(process.pid)
                return
        except psutil.Error:
            continue


if __name__ == "__main__":
    main()
