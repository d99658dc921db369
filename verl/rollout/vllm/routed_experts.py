"""Runs inside vLLM's processes: returns the experts that an MoE chose, on the CPU.

vLLM 0.32 returns them only with its second model runner, which needs Triton. The first runner, the only one on the CPU,
lacks a few calls of the connector that collects them: `connect_routed_experts` adds these. Connector, cache of prompts
and output are vLLM's own. Remove this when vLLM accepts `enable_return_routed_experts` on the CPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu.input_batch import InputBatch


class RoutingScheduler(Scheduler):
    """vLLM's scheduler, which passes on the experts of every token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aux_output_connector = AuxOutputSchedulerConnector()


def connect_routed_experts(runner: Any) -> None:
    """Make vLLM's first model runner report the experts of every step to vLLM's connector."""
    connector = get_aux_output_connector(runner.model, runner.vllm_config, runner.kv_cache_config)
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens

    def execute(scheduler_output: Any, *args: Any) -> Any:
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute_model(scheduler_output, *args)

    def sample(grammar_output: Any) -> Any:
        has_run = runner.execute_model_state is not None
        output = sample_tokens(grammar_output)
        if has_run and (pending := connector.prepare_output(_describe_batch(runner))) is not None:
            counts = np.array([len(tokens) for tokens in output.sampled_token_ids])
            pending.enqueue_cpu_copy(counts, np.zeros_like(counts))
            output.aux_output_connector_output = pending.process_output()
        return output

    runner.execute_model, runner.sample_tokens = execute, sample


def _describe_batch(runner: Any) -> InputBatch:
    """Return which rows of the last step belong to which request, in the words of the second runner."""
    batch = runner.input_batch
    count = len(batch.req_ids)
    described = SimpleNamespace(
        req_ids=list(batch.req_ids),
        query_start_loc_np=runner.query_start_loc.np[: count + 1].copy(),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),
    )
    return cast(InputBatch, described)
