"""Tiny models trained with Megatron-Core on 4 gloo ranks in every layout, and with FSDP2 on one rank."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gradient import (
    MIXTURE,
    Recorder,
    micro_batches,
    objectives,
    random_sequences,
    with_other_policies,
)
from parallel import compare, random_cut
from ranks import free_port
from tiny import chat_tokenizer, save_family, tiny_family, tiny_qwen2
from transformers import AutoModelForTokenClassification, Qwen2ForCausalLM, Qwen2ForTokenClassification

from verl.algorithms.objective import PolicyObjective, ValueObjective
from verl.algorithms.settings import AlgorithmSettings
from verl.checkpoint.manifest import CheckpointDir
from verl.checkpoint.save import load, save
from verl.checkpoint.shards import read_tensors
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.megatron.settings import MegatronSettings
from verl.training.process_group import init_process_group
from verl.training.settings import Schedule
from verl.workers.train import TrainSettings, TrainWorker

_OWN = str(Path(__file__).resolve().parent)
sys.path[:] = [path for path in sys.path if path != _OWN]  # where megatron.py would hide the package `megatron`
RANKS, BEFORE, AFTER, STEP = 4, 3, 2, 2
SPLIT = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
DENSE: dict[str, dict[str, int]] = {
    "DP 4": {},
    "TP 2, DP 2": {"tensor_parallel_size": 2},
    "PP 2, DP 2": {"pipeline_parallel_size": 2},
    "TP 2, PP 2": SPLIT,
    "CP 2, DP 2": {"context_parallel_size": 2},
    "TP 2, CP 2": {"tensor_parallel_size": 2, "context_parallel_size": 2},
}
EXPERTS: dict[str, dict[str, int]] = {
    **DENSE,
    "EP 2, DP 4": {"expert_parallel_size": 2},
    "EP 4": {"expert_parallel_size": 4},
    "TP 2, EP 2, DP 2": {"tensor_parallel_size": 2, "expert_parallel_size": 2},
    "PP 2, EP 2": {"pipeline_parallel_size": 2, "expert_parallel_size": 2},
    "CP 2, EP 4": {"context_parallel_size": 2, "expert_parallel_size": 4},
    "PP 2, CP 2, EP 2": {"pipeline_parallel_size": 2, "context_parallel_size": 2, "expert_parallel_size": 2},
    "TP 2, PP 2, EP 2": SPLIT | {"expert_parallel_size": 2},
}
FAMILIES = {"Qwen2": DENSE, "Qwen3": DENSE, "Llama 3": DENSE, "Qwen3-MoE": EXPERTS}
ALL_TERMS = ("Qwen2", "Qwen3-MoE")
"""Families whose gradients of all terms are compared; those of the others are seen in their updates."""
SAVED = {"Qwen2": "TP 2, PP 2", "Qwen3": "TP 2, PP 2", "Llama 3": "TP 2, PP 2", "Qwen3-MoE": "TP 2, PP 2, EP 2"}
REFUSED = {"kl full", "distillation", "distillation forward", *MIXTURE}
"""Terms that need the whole vocabulary of another model, or the experts of a batch."""
HEADS = {"actor": "tokens", "critic": "value"}
OPTIONS = {"schedule": Schedule(1e-2), "eps": 1e-3, "weight_decay": 0.1}
OBJECTIVES = {
    "actor": PolicyObjective(AlgorithmSettings(agg_mode="seq-mean-token-mean", entropy_coeff=0.1, loss_kl_coef=0.2)),
    "critic": ValueObjective(AlgorithmSettings(value_clip=10.0, value_agg_mode="seq-mean-token-mean")),
}
Results = dict[str, Any]


def save_models(directory: Path, families: Sequence[str]) -> None:
    """Save an actor and a critic of each of the families in `directory/family/role`."""
    sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    for family in families:
        actor, critic = (directory / family / role for role in HEADS)
        torch.manual_seed(0)
        if family == "Qwen2":
            Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=True, **sizes)).save_pretrained(actor)
            Qwen2ForTokenClassification(tiny_qwen2(num_labels=1, **sizes)).save_pretrained(critic)
        else:
            save_family(family, actor, norm_topk_prob=True, **sizes)
            config = tiny_family(family, norm_topk_prob=True, num_labels=1, **sizes)
            AutoModelForTokenClassification.from_config(config).save_pretrained(critic)
        chat_tokenizer().save_pretrained(actor)


def select_terms(index: int, stride: int) -> dict[str, tuple[str, Any]]:
    """Return every `stride`th of the terms and modes that Megatron-Core can compute, from the `index`th on."""
    wanted = [(key, value) for key, value in objectives().items() if value[0] not in REFUSED]
    return dict(wanted[index % stride :: stride])


def train(engine: Any, mini_batch: Any, updates: int, seed: int) -> list[dict[str, float]]:
    """Return the metrics of updates on one mini-batch, each time cut at random."""
    metrics = []
    for number in range(updates):
        cut = random_cut(mini_batch.batch.lengths.tolist(), engine.layout.data_size, seed + number)
        metrics.append(engine.update(mini_batch.batch.split(cut[engine.data_rank]), OBJECTIVES[engine.settings.role]))
    return metrics


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


# --- FSDP2 on one rank, in the process of the script


def compute_reference(directory: Path, families: Sequence[str]) -> None:
    """Save mini-batches, gradients and metrics of all terms, and the metrics and weights of 5 updates."""
    init_process_group(0, 1, "127.0.0.1", free_port())
    for family in families:
        reference: Results = {"updates": {}, "terms": {}}
        generator = torch.Generator().manual_seed(3)
        recorders = {role: Recorder(fsdp_settings(directory, family, role)) for role in HEADS}
        mini_batch = with_other_policies(random_sequences(generator), *recorders.values(), generator)
        reference["mini_batch"] = mini_batch
        reference["outputs"] = {role: engine.forward([mini_batch.batch])[0] for role, engine in recorders.items()}
        reference["names"] = {
            role: [name for name, _ in engine.model.hf.named_parameters()] for role, engine in recorders.items()
        }
        for key, (term, objective) in select_terms(0, 1).items() if family in ALL_TERMS else ():
            engine = recorders["critic" if term == "value" else "actor"]
            batches = micro_batches(engine, mini_batch, [range(len(mini_batch.batch))], term)
            metrics = engine.update(batches, objective)
            assert float(engine.gradient.norm()) > 0.0, key
            reference["terms"][key] = engine.gradient, metrics
        for role in HEADS:
            engine = FsdpEngine(fsdp_settings(directory, family, role))
            start = weights_of(engine)
            metrics = train(engine, mini_batch, BEFORE, 0)
            save(engine.state(), directory / family / f"{role}-FSDP2")
            metrics += train(engine, mini_batch, AFTER, BEFORE)
            weights = weights_of(engine)
            assert largest_gap(weights, start) > 1e-3, "updates change the model"
            reference["updates"][role] = metrics, weights
        torch.save(reference, directory / family / "reference.pt")
    dist.destroy_process_group()


def resume_with_fsdp(directory: Path, families: Sequence[str]) -> dict[str, dict[str, float]]:
    """Load on one rank what Megatron-Core has saved, save it again, and return how far two more updates are off."""
    init_process_group(0, 1, "127.0.0.1", free_port())
    found = {}
    for family in families:
        reference = torch.load(directory / family / "reference.pt", weights_only=False)
        for role in HEADS:
            engine = FsdpEngine(fsdp_settings(directory, family, role))
            found[f"{family} {role}, FSDP2"] = resume(engine, directory / family / f"{role}-Megatron", reference)
    dist.destroy_process_group()
    return found


def fsdp_settings(directory: Path, family: str, role: str) -> FsdpSettings:
    return FsdpSettings(str(directory / family / role), head=HEADS[role], role=role, **OPTIONS)  # type: ignore[arg-type]


# --- Megatron-Core on several ranks, and on one


def rank_main(rank: int, ports: list[int], directory: Path, families: Sequence[str], stride: int) -> None:
    """Compare every layout with the reference, save, merge, and resume on one rank."""
    import tests.megatron_on_cpu  # noqa: F401 - in processes of their own

    torch.set_num_threads(1)
    init_process_group(rank, RANKS, "127.0.0.1", ports[0])
    results: Results = {"gradients": {}, "losses": {}, "outputs": {}, "weights": {}, "resumed": {}}
    for family in families:
        reference = torch.load(directory / family / "reference.pt", weights_only=False)
        for number, (layout, sizes) in enumerate(FAMILIES[family].items()):
            compare_layout(directory, family, layout, sizes, reference, results, number, stride)
            if rank == 0:
                print(f"{family:10} {layout:18} {summarize(results, f'{family}, {layout}')}", flush=True)
    dist.destroy_process_group()
    for port, family in zip(ports[1:], [name for name in families if name in ALL_TERMS], strict=True):
        save_with_a_worker(rank, port, directory / family, FAMILIES[family][SAVED[family]])
    if rank == 0:
        init_process_group(0, 1, "127.0.0.1", free_port())
        for family in families:
            reference = torch.load(directory / family / "reference.pt", weights_only=False)
            for role in HEADS:
                engine = make_engine(directory, family, role, {})
                found = resume(engine, directory / family / f"{role}-Megatron", reference)
                results["resumed"][f"{family} {role}, one rank"] = found
        (directory / "results.json").write_text(json.dumps(results))


def make_engine(directory: Path, family: str, role: str, sizes: dict[str, int]) -> Any:
    from tests.megatron_on_cpu import build_engine

    path = str(directory / family / role)
    return build_engine(MegatronSettings(path, head=HEADS[role], role=role, **OPTIONS, **sizes))  # type: ignore[arg-type]


def compare_layout(
    directory: Path,
    family: str,
    layout: str,
    sizes: dict[str, int],
    reference: Results,
    results: Results,
    number: int,
    stride: int,
) -> None:
    from tests.megatron_on_cpu import leave_layout

    leave_layout()
    key, mini_batch = f"{family}, {layout}", reference["mini_batch"]
    recorders = {role: make_engine(directory, family, role, sizes) for role in HEADS}
    for role, engine in recorders.items():
        (output,) = engine.forward([mini_batch.batch])
        for mine, theirs in zip(output, reference["outputs"][role], strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                results["outputs"][f"{key}, {role}"] = largest_gap({"output": mine}, {"output": theirs})
        record_gradients(engine, reference["names"][role])
    for index, (term, objective) in select_terms(number, stride).items() if reference["terms"] else ():
        engine = recorders["critic" if term == "value" else "actor"]
        cut = random_cut(mini_batch.batch.lengths.tolist(), engine.layout.data_size, seed=1000 * number + len(index))
        batches = micro_batches(engine, mini_batch, cut[engine.data_rank], term)
        metrics = engine.update(batches, objective)
        gaps = compare(engine.gradient, metrics, *reference["terms"][index])
        results["gradients"][f"{key}, {index}"], results["losses"][f"{key}, {index}"] = gaps
    del recorders
    for role in HEADS:
        engine, (expected, weights) = make_engine(directory, family, role, sizes), reference["updates"][role]
        metrics = train(engine, mini_batch, BEFORE, 100 + 10 * number)
        if layout == SAVED[family]:
            save(engine.state(), directory / family / f"{role}-Megatron")
        metrics += train(engine, mini_batch, AFTER, 200 + 10 * number)
        results["losses"][f"{key}, {role}"] = largest_difference(metrics, expected)
        results["weights"][f"{key}, {role}"] = largest_gap(weights_of(engine), weights)
        if layout == SAVED[family]:
            engine = make_engine(directory, family, role, sizes)
            found = resume(engine, directory / family / f"{role}-FSDP2", reference)
            results["resumed"][f"{key} {role}"] = found


def record_gradients(engine: Any, names: list[str]) -> None:
    """Let updates of an engine keep the gradient of these parameters instead of stepping."""
    from verl.training.megatron.parallel_state import add_bytes

    optimizer, stage = engine.optimizer, engine.stage
    assert list(stage.shapes) == names

    def step(lr: float, *, should_step: bool) -> tuple[float, bool]:
        optimizer._chain.prepare_grads()
        norm, values, pieces = float(optimizer._chain.get_grad_norm()), {}, []
        for name, parameter in stage.module.named_parameters():
            part, shards = optimizer._find(parameter)
            whole = torch.zeros(parameter.numel())
            if parameter in shards:
                own, start, stop = shards[parameter]
                whole[start:stop] = own.grad.view(-1)
            add_bytes(whole, part.data_parallel_group)
            values[name] = whole.view(parameter.shape)
        for name, shape in stage.shapes.items():
            whole, box = torch.zeros(shape), stage.boxes.get(name)
            if box is not None and box.is_first:
                whole[box.index] = box.read(values)
            add_bytes(whole)
            pieces.append(whole.flatten())
        engine.gradient = torch.cat(pieces)
        optimizer.clear_gradients()
        return norm, False

    optimizer.step = step


def resume(engine: Any, checkpoint: Path, reference: Results) -> dict[str, float]:
    """Continue from a checkpoint; return how many of its tensors change if it is saved again, and the differences."""
    engine.load_state(load(engine.state(), checkpoint))
    again = checkpoint.with_name(f"{checkpoint.name}-{engine.settings.engine}-{engine.world_size}")
    save(engine.state(), again)
    saved, loaded = (
        {name: each for name, each in read_tensors(path) if not name.startswith("rng.")} for path in (checkpoint, again)
    )
    changed = [name for name in saved if not torch.equal(saved[name], loaded[name])]
    expected, weights = reference["updates"][engine.settings.role]
    metrics = train(engine, reference["mini_batch"], AFTER, 300)
    return {
        "tensors": len(saved),
        "changed": len(changed) + len(saved.keys() ^ loaded.keys()),
        "losses": largest_difference(metrics, expected[BEFORE:]),
        "weights": largest_gap(weights_of(engine), weights),
    }


def save_with_a_worker(rank: int, port: int, folder: Path, sizes: dict[str, int]) -> None:
    """Train and save as a run does, and keep the weights for the comparison with the merged model."""
    worker = TrainWorker(rank, RANKS)
    actor = MegatronSettings(str(folder / "actor"), **OPTIONS, **sizes)  # type: ignore[arg-type]
    settings = TrainSettings(
        actor=actor, algorithm=AlgorithmSettings(), external_modules=("tests.megatron_on_cpu",), save_hf=True
    )
    worker.start(("127.0.0.1", port), settings)
    engine = worker._policy.actor
    mini_batch = torch.load(folder / "reference.pt", weights_only=False)["mini_batch"]
    train(engine, mini_batch, 2, 0)
    step = CheckpointDir(folder / "run").step_dir(STEP)
    weights = weights_of(engine)
    if rank == 0:
        CheckpointDir(folder / "run").begin(STEP)
        torch.save(weights, folder / "held.pt")
    dist.barrier()
    worker.save(str(step), {})
    worker.poll_save(wait=True)
    dist.barrier()
    worker.leave()


# --- differences


def largest_gap(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of an element, relative to those above 1."""
    assert tensors.keys() == expected.keys(), tensors.keys() ^ expected.keys()
    return worst(float(((tensors[name] - each).abs() / (1 + each.abs())).max()) for name, each in expected.items())


def largest_difference(metrics: list[dict[str, float]], expected: list[dict[str, float]]) -> float:
    """Return the largest difference of a metric, relative to those above 1."""
    gaps = []
    for mine, theirs in zip(metrics, expected, strict=True):
        assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
        gaps += [abs(mine[name] - value) / max(1.0, abs(value)) for name, value in theirs.items()]
    return worst(gaps)


def worst(values: Iterable[float]) -> float:
    """Return the largest value; infinity if there is none, or one that is not a number."""
    found = [*values]
    return max(found) if found and all(map(math.isfinite, found)) else math.inf


def summarize(results: Results, key: str) -> str:
    """Return the largest difference of each kind in one layout."""
    parts = []
    for kind in ("outputs", "gradients", "losses", "weights"):
        found = [gap for name, gap in results[kind].items() if name.startswith(f"{key}, ")]
        if found:
            parts.append(f"{kind} {worst(found):.1e} ({len(found)})")
    return "   ".join(parts)
