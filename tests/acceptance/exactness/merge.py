"""A checkpoint becomes a Hugging Face model that anybody can load, and gives the logits that training ended with.

A Qwen2, a Llama and a tied Qwen2 are trained for two updates by the real train worker on 2 ranks over FSDP2, and saved.
`python -m verl.model_merger merge` merges; a process that has never imported verl loads the result with
`AutoModelForCausalLM.from_pretrained` and computes logits: those of the weights that the ranks held, bit by bit.
`trainer.save_hf` writes the same model next to the shards. A corrupt checkpoint is refused with the name of the file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _common import ROOT, finish
from ranks import free_port, run_ranks
from tiny import chat_tokenizer, tiny_qwen2
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from verl.algorithms.objective import PolicyObjective
from verl.algorithms.settings import AlgorithmSettings
from verl.checkpoint.manifest import CheckpointDir
from verl.data.flat_batch import FlatBatch
from verl.training.fsdp.settings import FsdpSettings
from verl.training.settings import Schedule
from verl.workers.train import TrainSettings, TrainWorker

RANKS, STEP = 2, 5
VOCABULARY = 131
TOKENS = torch.arange(24)[None] * 37 % VOCABULARY
STRANGER = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokens, out, *folders = sys.argv[1:]
loaded = []
for folder in folders:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model.eval()(torch.load(tokens, weights_only=True)).logits
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    loaded.append({"logits": logits, "tied": torch.tensor(head is embedding)})
torch.save(loaded, out)
assert not any(name.split(".")[0] == "verl" for name in sys.modules)
"""


def models() -> dict[str, Any]:
    """By name: untied and tied, kept as they were and wider than they were, in two families."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 150, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {
        "tied": lambda: Qwen2ForCausalLM(tiny_qwen2(vocab_size=VOCABULARY, tie_word_embeddings=True)).bfloat16(),
        "qwen2": lambda: Qwen2ForCausalLM(tiny_qwen2(vocab_size=VOCABULARY, tie_word_embeddings=False)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False)).bfloat16(),
    }


SHARD = "shard-00002-of-00002.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="the same")
    parser.parse_args()
    kinds = models()
    checks: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="verl-merge-") as directory:
        root = Path(directory)
        torch.save(TOKENS, root / "tokens.pt")
        for name, make in kinds.items():
            torch.manual_seed(0)
            make().save_pretrained(root / name / "model")
            chat_tokenizer().save_pretrained(root / name / "model")
        run_ranks(train_and_save, RANKS, free_port(), root, list(kinds), deadline_s=300)
        for name in kinds:
            checks |= {f"{name}: {what}": right for what, right in round_trip(root / name, root / "tokens.pt").items()}
        checks |= refusals(root / "tied")
    for what, right in checks.items():
        print(f"{'pass' if right else 'FAIL'}: {what}")
    finish(
        "merge", all(checks.values()), models=list(kinds), ranks=RANKS, checks=len(checks), right=sum(checks.values())
    )


def train_and_save(rank: int, port: int, root: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    joined = ("127.0.0.1", port)
    for index, name in enumerate(names):
        if index:
            torch.distributed.destroy_process_group()
            joined = ("127.0.0.1", port + index)
        worker = TrainWorker(rank, RANKS)
        actor = FsdpSettings(str(root / name / "model"), schedule=Schedule(1e-2), compute_dtype="float32")
        worker.start(joined, TrainSettings(actor=actor, algorithm=AlgorithmSettings(), save_hf=True))
        engine = worker._policy.actor
        for _ in range(2):
            engine.update([batch(rank)], PolicyObjective())
        weights = {each: tensor.clone() for each, tensor in engine.weights()}
        step = CheckpointDir(root / name / "run").step_dir(STEP)
        if rank == 0:
            CheckpointDir(root / name / "run").begin(STEP)
            torch.save(weights, root / name / "held.pt")
        torch.distributed.barrier()
        worker.save(str(step), {})
        worker.poll_save(wait=True)
        torch.distributed.barrier()


def batch(rank: int) -> FlatBatch:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(VOCABULARY, (40,), generator=generator)
    offsets, mask = torch.tensor([0, 13, 40]), torch.ones(40, dtype=torch.bool)
    mask[offsets[:-1]] = False
    logprobs, advantages = torch.full((40,), -4.0), torch.randn(40, generator=generator)
    return FlatBatch(tokens, offsets, mask, None, logprobs, logprobs, advantages)


def round_trip(folder: Path, tokens: Path) -> dict[str, bool]:
    actor, merged = folder / "run" / f"global_step_{STEP}" / "actor", folder / "merged"
    where = ["--local_dir", str(actor), "--target_dir", str(merged)]
    result = command("-m", "verl.model_merger", "merge", "--backend", "fsdp", *where)
    print(result.stdout + result.stderr, end="")
    if result.returncode:
        return {"merged": False}
    original = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto")
    right, moved = logits_of(original, torch.load(folder / "held.pt", weights_only=True))
    stranger, saved_along = stranger_loads(tokens, merged, actor / "huggingface")
    sizes = [sum(file.stat().st_size for file in each.glob("*.safetensors")) for each in (merged, folder / "model")]
    return {
        "training had moved it": moved,
        "logits equal in a process without verl": torch.equal(stranger["logits"], right),
        "in the type of the original": stranger["logits"].dtype == original.dtype,
        "tied as the original": bool(stranger["tied"]) == original.config.tie_word_embeddings,
        "trainer.save_hf wrote the same": torch.equal(saved_along["logits"], right),
        "as large as the original": abs(sizes[0] - sizes[1]) < 1000,
    }


def logits_of(model: PreTrainedModel, held: dict[str, torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """Return the logits with the weights of the ranks, in the model's dtype; and whether the weights have changed."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == held.keys()
    with torch.no_grad():
        moved = any(not torch.equal(parameters[name], tensor.to(model.dtype)) for name, tensor in held.items())
        for name, tensor in held.items():
            parameters[name].copy_(tensor)
        return model.eval()(TOKENS).logits, moved


def stranger_loads(tokens: Path, *folders: Path) -> list[dict[str, torch.Tensor]]:
    """In a process that has never imported verl."""
    out = tokens.with_name("stranger.pt")
    command = [sys.executable, "-P", "-c", STRANGER, str(tokens), str(out), *map(str, folders)]
    subprocess.run(command, cwd=tokens.parent, check=True, timeout=300)
    return torch.load(out, weights_only=True)


def refusals(folder: Path) -> dict[str, bool]:
    """What is wrong is named, and nothing is written."""
    actor, target = folder / "run" / f"global_step_{STEP}" / "actor", folder / "never"
    shard = actor / SHARD
    whole = shard.read_bytes()
    shard.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    checks = {"a flipped bit is refused, with the name of the file": refused(actor, target, f"actor/{SHARD}")}
    shard.write_bytes(whole)
    shard.write_bytes(whole[:-1])
    checks["a short file is refused with its name"] = refused(actor, target, f"actor/{SHARD}")
    shard.write_bytes(whole)
    config = actor / "huggingface" / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"hidden_size": 64', '"hidden_size": 65'))
    checks["a changed config is refused with its name"] = refused(actor, target, "actor/huggingface/config.json")
    config.write_text(text)
    checks["an option of another format is refused by name"] = refused(
        actor, target, "--tie-word-embedding", "--backend", "megatron", "--tie-word-embedding"
    )
    compared = ["--backend", "fsdp", "--local_dir", str(actor), "--test_hf_dir"]
    same = command("-m", "verl.model_merger", "test", *compared, str(folder / "merged"))
    other = command("-m", "verl.model_merger", "test", *compared, str(folder / "model"))
    respelt = [each.replace("global_step_", "global_steps_") for each in compared]
    taken = command("-m", "verl.model_merger", "test", *respelt, str(folder / "merged"))
    checks["global_steps_N is taken for global_step_N"] = taken.returncode == 0
    checks["test distinguishes the merged model from the one before training"] = (
        same.returncode,
        other.returncode,
    ) == (0, 2)
    again = command("-m", "verl", "merge", "--local_dir", str(actor), "--target_dir", str(folder / "again"))
    weights = [(folder / each / "model.safetensors").read_bytes() for each in ("merged", "again")]
    checks["verl merge writes the same bytes"] = again.returncode == 0 and weights[0] == weights[1]
    return checks


def refused(actor: Path, target: Path, message: str, *more: str) -> bool:
    result = command("-m", "verl.model_merger", "merge", "--local_dir", str(actor), "--target_dir", str(target), *more)
    print(result.stdout + result.stderr, end="")
    left = [path.name for path in target.parent.iterdir() if "never" in path.name]
    return result.returncode == 2 and message in result.stderr and not left


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)


if __name__ == "__main__":
    main()
