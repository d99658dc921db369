"""Weights are replaced under running requests of a full engine: every token belongs to the weights that it names.

make show-inflight [ARGS=--short]

A vLLM engine that runs 8 requests at a time is asked for 32 long responses at once. While they run, its weights are
replaced 20 times, every second time while it sleeps as on devices that it shares with the trainer. Held: the probe
after each replacement agrees with the new model to 1e-4, and does not wait for the requests that fill the engine; the
log-prob of every sampled token agrees to 1e-4 with a forward pass of the model of its version over the whole sequence,
so that no cache outlives its weights; every response is complete.

`--short`: 6 replacements.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import finish  # isort: skip - puts tests/ on the path
import torch
from tiny import tiny_qwen2
from transformers import PreTrainedModel, Qwen2ForCausalLM

from verl.rollout.engine import load_weights
from verl.rollout.vllm.engine import VllmEngine
from verl.rollout.vllm.settings import VllmSettings
from verl.types import Completion, SamplingParams
from verl.weights.bucket import pack

VOCABULARY, LONGEST, AT_ONCE, REQUESTS = 64, 512, 8, 32
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12] * 20]
PROBE = [list(range(1, 25)), list(range(30, 54))]
LIMIT = 1e-4
TIMEOUT_S = 60.0  # of one replacement with its probe; the responses of a full engine take far longer here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="verl-inflight-") as folder:
        config = tiny_qwen2(vocab_size=VOCABULARY, max_position_embeddings=LONGEST, initializer_range=0.2)
        model = Qwen2ForCausalLM(config)
        model.save_pretrained(folder)
        figures = asyncio.run(replace_under_requests(model, Path(folder), 6 if options.short else 20))
    passed = figures["largest_gap"] <= LIMIT and figures["probe_gap"] <= LIMIT and figures["incomplete"] == 0
    enough = figures["most_versions_in_a_response"] > 2 and figures["probes_before_the_full_engine_was_done"]
    finish("inflight", passed and enough, allowed=LIMIT, **figures)


async def replace_under_requests(model: PreTrainedModel, folder: Path, replacements: int) -> dict[str, Any]:
    """Return what was seen; responses are requested again as they end, so that the engine stays full."""
    settings = VllmSettings(str(folder), dtype="float32", max_model_len=LONGEST, max_num_seqs=AT_ONCE)
    engine = VllmEngine(settings)
    await engine.start()
    models, probe_gaps, seconds, ended = [snapshot(model)], [], [], 0
    await sync(engine, model, 0)
    await engine.compute_logprobs(PROBE)
    responses: list[tuple[list[int], int, Completion]] = []
    is_over = False

    async def keep_asking(place: int) -> None:
        prompt = PROMPTS[place % len(PROMPTS)]
        while not is_over:
            tokens = LONGEST - len(prompt) - 7 * (place % 9)
            responses.append((prompt, tokens, await engine.generate(prompt, SamplingParams(max_tokens=tokens))))

    asking = [asyncio.create_task(keep_asking(place)) for place in range(REQUESTS)]
    for version in range(1, replacements + 1):
        await asyncio.sleep(0.3 * (version % 3))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        before, start = len(responses), time.monotonic()
        if version % 2 == 0:
            await engine.sleep()
        await sync(engine, model, version)
        probed = await asyncio.wait_for(engine.compute_logprobs(PROBE), TIMEOUT_S)
        seconds.append(time.monotonic() - start)
        ended = max(ended, len(responses) - before)
        models.append(snapshot(model))
        own = [logprobs_of(models[-1], each) for each in PROBE]
        probe_gaps.append(max(float((torch.tensor(a) - b).abs().max()) for a, b in zip(probed, own, strict=True)))
        print(f"version {version}: probe {probe_gaps[-1]:.1e} after {seconds[-1]:.2f} s", flush=True)
    is_over = True
    await asyncio.gather(*asking)
    await engine.close()
    gaps = [0.0] * len(models)
    for prompt, _, response in responses:
        versions = torch.from_numpy(response.versions)
        for version in sorted(set(versions.tolist())):
            own = logprobs_of(models[version], prompt + response.token_ids)[len(prompt) - 1 :]
            gap = (torch.tensor(response.logprobs) - own)[versions == version].abs().max()
            gaps[version] = max(gaps[version], float(gap))
    half = len(gaps) // 2
    return {
        "replacements": replacements,
        "responses": len(responses),
        "tokens": sum(len(response.token_ids) for _, _, response in responses),
        "incomplete": sum(len(response.token_ids) != tokens for _, tokens, response in responses),
        "most_versions_in_a_response": max(len(set(each.versions.tolist())) for _, _, each in responses),
        "largest_gap": max(gaps),
        "largest_gap_of_the_first_half": max(gaps[:half]),
        "largest_gap_of_the_second_half": max(gaps[half:]),
        "probe_gap": max(probe_gaps),
        "most_seconds": round(max(seconds), 2),
        "most_responses_ended_during_a_replacement": ended,
        "probes_before_the_full_engine_was_done": ended < AT_ONCE,
    }


async def sync(engine: VllmEngine, model: PreTrainedModel, version: int) -> None:
    weights = dict(model.named_parameters())
    await load_weights(engine, list(pack(weights.items(), max_bytes=100_000)), version)


def snapshot(model: PreTrainedModel) -> PreTrainedModel:
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    return copy


def logprobs_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


if __name__ == "__main__":
    main()
