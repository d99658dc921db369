"""Rules about rollout engines: they disagree with the trainer, or lack memory."""

from __future__ import annotations

from statistics import fmean

from verl.diagnosis.history import History
from verl.diagnosis.rule import Rule

_MAX_GAP = 0.01
_MAX_PREEMPTIONS, _PREEMPTION_STEPS = 0.1, 3  # per response, and the steps whose mean it is


def _find_engine_mismatch(run: History) -> str | None:
    gap = run.get("training/rollout_probs_diff_mean")
    if gap <= _MAX_GAP or run.get("training/staleness"):  # expected if responses are older
        return None
    return (
        "trainer and rollout engine compute different probabilities: training/rollout_probs_diff_mean is "
        f"{gap:.4f} (healthy: below 0.005)"
    )


ENGINE_MISMATCH = Rule(
    "engine-mismatch",
    _find_engine_mismatch,
    metrics=("training/rollout_probs_diff_mean", "training/staleness"),
    meaning=(
        "The engine generates with other probabilities than the trainer computes for the same tokens and weights, "
        "because of precision, kernels or sampling. The update then corrects for differences that are not there."
    ),
    limits=(
        f"A mean difference above {_MAX_GAP:g}: bfloat16 alone gives up to 0.005. Steps with older responses are "
        "exempt, because their probabilities have changed since."
    ),
    remedy=(
        "this is expected if top_p or top_k restrict sampling without keep_sampling_mask; otherwise try "
        "`actor_rollout_ref.rollout.dtype=float32`, with vLLM on long contexts "
        "`+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn=True`, or correct for it with "
        "`algorithm.rollout_correction.rollout_is=token`"
    ),
)


def _find_kv_preemption(run: History) -> str | None:
    preemptions = run.values("perf/preemptions_per_response", last=_PREEMPTION_STEPS)
    if len(preemptions) < _PREEMPTION_STEPS or fmean(preemptions) <= _MAX_PREEMPTIONS:
        return None
    return (
        f"the engines' KV cache is too small: over the last {_PREEMPTION_STEPS} steps a response was preempted "
        f"{fmean(preemptions):.2g} times on average, and computed again from its beginning each time"
    )


KV_PREEMPTION = Rule(
    "kv-preemption",
    _find_kv_preemption,
    metrics=("perf/preemptions_per_response",),
    meaning=(
        "vLLM runs more responses at once than its KV cache can hold until their ends. It then drops the cache of some "
        "and computes them again later: results are the same, generation is slower."
    ),
    limits=(
        f"More than {_MAX_PREEMPTIONS:g} preemptions per response, on average over {_PREEMPTION_STEPS} steps; some are "
        "cheaper than an engine that is not full."
    ),
    remedy=(
        "lower `actor_rollout_ref.rollout.max_num_seqs`, or give the cache more memory: "
        "`actor_rollout_ref.rollout.gpu_memory_utilization=0.8`, a larger "
        "`actor_rollout_ref.rollout.tensor_model_parallel_size`, or a smaller `data.max_response_length`"
    ),
)
