"""Rules about devices and hosts: they wait, one is slow, or memory runs out."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from verl.diagnosis.history import History
from verl.diagnosis.rule import Rule

_IDLE = 0.3  # share of a step
_SLOW, _SLOW_STEPS, _SAME_RANK_STEPS = 1.5, 10, 8
_FIRST_STEPS, _MEMORY_PARTS, _PART_STEPS = 20, 6, 10
_MIN_GROWTH, _MIN_GIB = 1.2, 0.5


def _find_idle_trainer(run: History) -> str | None:
    training, generation = run.get("perf/trainer_idle"), run.get("perf/generation_idle")
    if training <= _IDLE or training <= generation:
        return None
    return f"the train workers waited for responses during {training:.0%} of the step"


_IDLE_METRICS = ("perf/trainer_idle", "perf/generation_idle")

IDLE_TRAINER = Rule(
    "idle-trainer",
    _find_idle_trainer,
    metrics=_IDLE_METRICS,
    meaning="Where training and generation have devices of their own, those of training wait for responses.",
    limits=f"More than {_IDLE:.0%} of a step, and more than the engines waited.",
    remedy=(
        "give generation more of the devices (`actor_rollout_ref.rollout.n_gpus_per_node`), lend it those of training "
        "(`actor_rollout_ref.rollout.lend_train_devices=True`), or let it run further ahead "
        "(`async_training.staleness_threshold`, `trainer.max_staleness`)"
    ),
)


def _find_idle_generation(run: History) -> str | None:
    training, generation = run.get("perf/trainer_idle"), run.get("perf/generation_idle")
    if generation <= _IDLE or training > max(_IDLE, generation):
        return None
    return f"no response was generated during {generation:.0%} of the step, because training is behind"


IDLE_GENERATION = Rule(
    "idle-generation",
    _find_idle_generation,
    metrics=_IDLE_METRICS,
    meaning=(
        "Where training and generation have devices of their own, the engines have generated as far ahead as they may, "
        "and wait for new weights."
    ),
    limits=f"More than {_IDLE:.0%} of a step, and at least as much as the train workers waited.",
    remedy=(
        "give training more of the devices (`trainer.n_gpus_per_node`), or let generation run further ahead "
        "(`async_training.staleness_threshold`, `trainer.max_staleness`)"
    ),
)


def _find_slow_rank(run: History) -> str | None:
    ranks = run.values("perf/slowest_rank", last=_SLOW_STEPS)
    slowdowns = run.values("perf/slowest_rank_slowdown", last=_SLOW_STEPS)
    if len(ranks) < _SLOW_STEPS or (slowdown := median(slowdowns)) <= _SLOW:
        return None
    rank = max(set(ranks), key=ranks.count)
    if ranks.count(rank) < _SAME_RANK_STEPS:
        return None
    return (
        f"train rank {rank:.0f} computes {slowdown:.2g} times slower than the others (the median of the last "
        f"{_SLOW_STEPS} steps), and all ranks wait for it"
    )


_INSPECT_DEVICE = (
    "look at clocks, temperature and errors of its device (`nvidia-smi -q`) and at the programs on its machine; "
    "exclude the machine if it stays slow"
)

SLOW_RANK = Rule(
    "slow-rank",
    _find_slow_rank,
    metrics=("perf/slowest_rank", "perf/slowest_rank_slowdown"),
    meaning=(
        "The device of one train rank is slow: hot, throttled, faulty, or used by other programs. All other ranks wait "
        "for it at every layer, so that the times of the step look alike. In each step every rank times the same small "
        "matrix product, which needs no other rank."
    ),
    limits=(
        f"The median of {_SLOW_STEPS} steps is above {_SLOW:g} times the time of the median rank, and the same rank is "
        f"the slowest in {_SAME_RANK_STEPS} of them: noise does not choose the same rank."
    ),
    remedy=_INSPECT_DEVICE,
    sft_remedy=_INSPECT_DEVICE,
)


def _find_memory_growth(run: History) -> str | None:
    for name, process in (("controller", "the controller"), ("train_worker", "a train worker")):
        sizes = run.values(f"perf/{name}_rss_gib")[_FIRST_STEPS:]
        if (width := len(sizes) // _MEMORY_PARTS) < _PART_STEPS:
            continue
        parts = [median(sizes[len(sizes) - k * width :][:width]) for k in range(_MEMORY_PARTS, 0, -1)]
        growth = [after - before for before, after in pairwise(parts)]
        total = parts[-1] - parts[0]
        is_steady = min(growth) > 0 and growth[-1] > total / len(growth) / 2
        if is_steady and total > _MIN_GIB and parts[-1] > _MIN_GROWTH * parts[0]:
            per_step = total / (len(growth) * width)
            return (
                f"the host memory of {process} keeps growing: perf/{name}_rss_gib from {parts[0]:.2f} to "
                f"{parts[-1]:.2f} GiB within {len(sizes)} steps, {per_step * 1024:.3g} MiB per step"
            )
    return None


_FIND_LEAK = (
    "look for lists and caches in custom functions that grow with each call; until it is found, save often enough "
    "(`trainer.save_freq=20`): a run that was killed resumes with the same command"
)

MEMORY_GROWTH = Rule(
    "memory-growth",
    _find_memory_growth,
    metrics=("perf/controller_rss_gib", "perf/train_worker_rss_gib"),
    meaning=(
        "A process keeps more host memory with every step, until the machine kills it. Usually a custom function or "
        "dataset collects objects, or a library leaks."
    ),
    limits=(
        f"After the first {_FIRST_STEPS} steps, in which caches fill: the medians of {_MEMORY_PARTS} equal parts of "
        f"the run, of at least {_PART_STEPS} steps each, rise each time without slowing down, by more than "
        f"{_MIN_GIB:g} GiB and {_MIN_GROWTH - 1:.0%} in all."
    ),
    remedy=_FIND_LEAK,
    sft_remedy=_FIND_LEAK,
)
