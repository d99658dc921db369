"""vLLM returns the experts that the trainer chooses in float32, also for prompts whose prefix is in its cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import torch
import torch.distributed as dist
from ranks import free_port
from tiny import save_family

from verl.data.flat_batch import FlatBatch
from verl.rollout.engine import load_weights
from verl.rollout.vllm.engine import VllmEngine, _sampling
from verl.rollout.vllm.settings import VllmSettings
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.types import SamplingParams
from verl.weights.bucket import pack

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

EXPERTS, TOP = 16, 4


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpEngine]:
    init_process_group(0, 1, "127.0.0.1", free_port())
    path = save_family("Qwen3-MoE", tmp_path_factory.mktemp("moe"), num_experts=EXPERTS, num_experts_per_tok=TOP)
    yield FsdpEngine(FsdpSettings(path, router_replay=True, trainable=False))
    dist.destroy_process_group()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(trainer: FsdpEngine) -> AsyncIterator[VllmEngine]:
    path = trainer.settings.model_path
    made = VllmEngine(VllmSettings(path, dtype="float32", max_model_len=256, max_num_seqs=8, routed_experts=True))
    await made.start()
    yield made
    await made.close()


def own_choice(trainer: FsdpEngine, tokens: list[int]) -> torch.Tensor:
    mask = torch.arange(len(tokens)) > 0
    [output] = trainer.forward([FlatBatch(torch.tensor(tokens), torch.tensor([0, len(tokens)]), mask)])
    assert output.routed_experts is not None
    return output.routed_experts


async def test_experts_are_the_trainers_own_with_a_cached_prefix_and_after_new_weights(
    trainer: FsdpEngine, engine: VllmEngine
) -> None:
    torch.manual_seed(0)
    params = SamplingParams(8, seed=0)
    prompt = torch.randint(3, 64, (200,)).tolist()  # longer than a block of the cache
    prompts = [prompt, prompt, prompt[:170] + prompt[:40]]
    for version in range(2):
        await load_weights(engine, [*pack(trainer.weights(), max_bytes=1 << 20)], version)
        cached = []
        for tokens in prompts:
            queue = await engine._add(tokens, _sampling(params))
            await engine._resume()
            final = await engine._result(queue)
            completion = engine._completion(final, params)
            cached.append(final.num_cached_tokens)
            assert completion.routed_experts is not None
            experts = torch.from_numpy(completion.routed_experts).to(torch.int16)
            expected = own_choice(trainer, tokens + completion.token_ids)[:-1]  # the last token was no input
            assert torch.equal(experts.sort(-1).values, expected.sort(-1).values)
        assert cached[0] == 0, "a weight sync clears the cache"
        assert min(cached[1:]) > 0, "nothing was cached: a weak test"
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
