"""`verl generate`: generate responses to the prompts of files, into a Parquet file.

The settings are those of `verl train`; the engines load the model from disk. Finished parts are stored next to the
output, so that rerunning the command resumes. Every response has its own seed, so that an interrupted run produces the
same responses.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.agents.episode import single_turn
from verl.agents.transcript import Transcript
from verl.checkpoint.locate import find_saved_model
from verl.cluster.hangs.pending_calls import MARGIN_S
from verl.commands.arguments import SETTINGS_HELP, ArgumentParser
from verl.commands.models.response_files import PartFiles, ResponseTable
from verl.config.command_line import split_arguments
from verl.config.load import LoadedConfig, load_for_generation
from verl.config.paths import change_settings
from verl.config.schema import MISSING
from verl.config.schema.root import Config
from verl.data.chat import chat_template_hint
from verl.data.dataset import PromptDataset
from verl.data.files import find_files
from verl.errors import ConfigError
from verl.models.stop_tokens import find_stop_tokens
from verl.rollout.replica_pool import EnginePool
from verl.rollout.supervisor import EngineSupervisor
from verl.tracking.console import Console
from verl.tracking.stages import Progress
from verl.trainer.restarts import RestartTracker
from verl.types import SamplingParams

HELP = f"""\
usage: verl generate FILE... --output RESPONSES.parquet [settings]

Generate actor_rollout_ref.rollout.n responses to each prompt of the files, of at most data.max_response_length tokens,
sampled with actor_rollout_ref.rollout.{{temperature,top_p,top_k}}. The output has the rows of the files and the columns
responses, finish_reasons and response_lengths. With actor_rollout_ref.rollout.multi_turn.enable=true the responses are
episodes with tools, an environment or an agent, and the columns conversations and rewards are added. Rerun the command
to resume.

options:
  --output FILE           Parquet file to write (responses.parquet)
  --part N                prompts per part; finished parts are kept when the command is interrupted (256)

{SETTINGS_HELP}
example:
  verl generate test.parquet --output responses.parquet model.path=Qwen/Qwen2.5-0.5B-Instruct rollout.n=8
  verl generate test.parquet model.path=checkpoints/verl/default   # the newest checkpoint of a run
"""

VERSION_FROM_DISK = -1
"""The weight version of an engine that has loaded the model itself."""

_RESPONSES_DEPEND_ON = {
    *("name", "n", "temperature", "top_p", "top_k", "max_model_len"),
    *("dtype", "quantization", "engine_kwargs", "multi_turn", "agent"),
}


def read_arguments(argv: Sequence[str]) -> tuple[Path, int, LoadedConfig[Config]]:
    """Return the output file, the prompts per part, and the settings, with the files as data.train_files."""
    parser = ArgumentParser("verl generate")
    parser.add_argument("--output", default="responses.parquet")
    parser.add_argument("--part", type=int, default=256)
    options, rest = parser.parse_known_args(list(argv))
    files, settings = split_arguments(rest)
    if files:
        settings.append(f"data.train_files={json.dumps(files)}")
    named = [text for text in settings if text.lstrip("+").startswith("data.output_path=")]  # as launch scripts do
    output = Path(named[-1].partition("=")[2] if named else options.output)
    loaded = load_for_generation([text for text in settings if text not in named])
    problems = []
    if loaded.config.data.train_files == MISSING:
        problems.append("files: no prompts are given; name a file, such as `verl generate test.parquet ...`")
    if loaded.config.actor_rollout_ref.model.path == MISSING:
        problems.append("actor_rollout_ref.model.path: must be given")
    if loaded.config.actor_rollout_ref.model.lora_adapter_path is not None:
        problems.append(
            "actor_rollout_ref.model.lora_adapter_path: `verl generate` loads whole models; merge the adapter into the "
            "model (PEFT's merge_and_unload), and set actor_rollout_ref.model.path to the result"
        )
    if options.part < 1:
        problems.append(f"--part: {options.part} must be at least 1")
    if output.suffix not in (".parquet", ".pq"):
        problems.append(
            f"--output: {output} must end in .parquet or .pq; try --output {output.with_suffix('.parquet')}"
        )
    if problems:
        raise ConfigError(problems)
    return output, options.part, replace(loaded, config=_with_saved_model(loaded.config))


def _with_saved_model(config: Config) -> Config:
    """Return the settings with the model in a checkpoint, if they name a checkpoint or the folder of a run."""
    key = "actor_rollout_ref.model.path"
    return change_settings(config, {key: find_saved_model(config.actor_rollout_ref.model.path, key)})


def main(argv: Sequence[str]) -> int:
    """Generate the responses that no earlier run has finished; return the exit code."""
    output, part, loaded = read_arguments(argv)
    if output.exists():
        raise ConfigError([f"--output: {output} already exists; remove it, or choose another file"])
    console = Console()
    console.hints(loaded.hints)
    asyncio.run(_generate(loaded.config, output, part, console))
    return 0


async def _generate(config: Config, output: Path, part: int, console: Console) -> None:
    with console.stage("checking the model and reading the data", is_logged=False):
        from verl.trainer.build.preflight import check_files
        from verl.trainer.build.runtime import with_absolute_paths

        check_files(config)
        prompts = _Prompts(config)
    dataset, table = prompts.dataset, ResponseTable(prompts.dataset, has_episodes=prompts.agent is not None)
    for note in filter(None, (str(dataset.report), prompts.hint, *table.notes)):
        console.note(note)
    config = with_absolute_paths(config, ["actor_rollout_ref.model.path"])
    parts = PartFiles(output, _describe_inputs(config) | {"part": part, "prompts": len(dataset)})
    starts = range(0, len(dataset), part)
    pending = [start for start in starts if not parts.has(start)]
    if finished := len(starts) - len(pending):
        prompts.finished = finished * part
        console.note(f"resuming: {finished} parts of {part} prompts are finished, in {parts.folder}")
    async with AsyncExitStack() as closing:
        pool, supervisor = await _start_engines(config, console, closing)
        if prompts.agent is not None:
            closing.push_async_callback(prompts.agent.close)
        for start in pending:
            rows = range(start, min(start + part, len(dataset)))
            generation = asyncio.gather(*(prompts.generate(row, config, pool) for row in rows))
            with console.stage("generating", prompts.measure_progress, is_logged=False):
                episodes = await supervisor.run_while_available(generation)
            columns = map(prompts.to_columns, episodes)
            parts.write(start, table.build([dataset.row(row) | new for row, new in zip(rows, columns, strict=True)]))
            console.note(f"{rows.stop:,} of {len(dataset):,} prompts are finished")
            if failures := [each.failure for group in episodes for each in group if each.failure is not None]:
                console.note(f"{len(failures):,} episodes failed (finish_reasons: error), one: {failures[0].message}")
        with console.stage("ending the processes", is_logged=False):
            await closing.aclose()
    parts.finish()
    console.note(f"wrote {output}: {len(dataset):,} prompts, {config.actor_rollout_ref.rollout.n} responses each")


async def _start_engines(
    config: Config, console: Console, closing: AsyncExitStack
) -> tuple[EnginePool, EngineSupervisor]:
    """Start the rollout engines, which load the model from disk, and their supervisor; `closing` ends them."""
    with console.stage("importing libraries", is_logged=False):
        from verl.trainer.build.placement import place_engines
        from verl.trainer.build.rl_builder import build_supervisor
        from verl.trainer.build.runtime import RunBuilder
        from verl.trainer.build.worker_settings import timeouts

    restarts, limits = RestartTracker(console, config.trainer.faults), timeouts(config)
    builder = RunBuilder(config, console, restarts, closing)
    await builder.start_runtime()
    engines = place_engines(config, builder.pool, builder.device, load_format="auto")
    for engine in engines:
        closing.push_async_callback(engine.close)
    with console.stage("starting the rollout engines"):
        await asyncio.gather(*(engine.start() for engine in engines))
    supervisor = build_supervisor(config, engines, restarts)

    async def sync_one(engine_id: int) -> None:
        supervisor.mark_synced(engine_id)
        await supervisor.mark_ready(engine_id, VERSION_FROM_DISK)

    for engine_id in supervisor.states:
        await supervisor.mark_ready(engine_id, VERSION_FROM_DISK)
    supervisor.start(sync_one)
    closing.push_async_callback(supervisor.close)
    stall_timeout_s, reply_timeout_s = limits.generation.seconds + MARGIN_S, limits.reply.seconds + MARGIN_S
    return EnginePool(supervisor.view, stall_timeout_s=stall_timeout_s, reply_timeout_s=reply_timeout_s), supervisor


class _Prompts:
    """The prompts of the files, and how responses to them are generated."""

    def __init__(self, config: Config) -> None:
        from verl.trainer.build.data import add_tools, check_rows, open_agents, open_tokenizer, prompt_options

        model, rollout, data = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, config.data
        self.tokenizer = tokenizer = open_tokenizer(model, "actor_rollout_ref.model")
        has_agent = rollout.multi_turn.enable
        self.agent = open_agents(config, tokenizer) if has_agent else None  # None: one response to each prompt
        options = add_tools(prompt_options(data), [] if self.agent is None else self.agent.list_schemas())
        self.dataset = PromptDataset(data.train_files, tokenizer, options, num_workers=data.num_workers)
        if self.agent is not None:
            check_rows([self.dataset], self.agent)
        stops = find_stop_tokens(model.path, tokenizer.eos_token_id)
        self.sampling = SamplingParams(
            data.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k, stops
        )
        first = self.dataset.row(0)[data.prompt_key]
        self.hint = chat_template_hint(tokenizer, first, data.apply_chat_template_kwargs)
        self.finished = 0

    async def generate(self, row: int, config: Config, pool: EnginePool) -> list[Transcript]:
        prompt = self.dataset[row]
        assert prompt is not None, "only streamed data sets drop prompts late"
        play = self.agent or single_turn
        count = config.actor_rollout_ref.rollout.n
        seeds = [SamplingParams.make_seed(config.trainer.seed, "generate", prompt.row, index) for index in range(count)]
        episodes = (play(prompt, pool.start_episode(), replace(self.sampling, seed=seed)) for seed in seeds)
        finished = await asyncio.gather(*episodes)
        self.finished += 1
        return finished

    def measure_progress(self) -> Progress:
        return Progress(self.finished, len(self.dataset), "prompts")

    def to_columns(self, episodes: Sequence[Transcript]) -> dict[str, Any]:
        columns: dict[str, Any] = {
            "responses": [self._decode_last(each) for each in episodes],
            "finish_reasons": ["error" if each.failure else each.finish_reason for each in episodes],
            "response_lengths": [each.count_generated() for each in episodes],
        }
        if self.agent is not None:
            columns["conversations"] = [json.dumps(each.messages or []) for each in episodes]
            columns["rewards"] = [each.own_score for each in episodes]
        return columns

    def _decode_last(self, episode: Transcript) -> str:
        tokens = list(episode.last.completion.token_ids) if episode.turns else []
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def _describe_inputs(config: Config) -> dict[str, Any]:
    """Return the settings and files that the responses depend on: parts of different inputs are not mixed."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    return {
        "data": config.data.model_dump(mode="json", exclude={"num_workers", "cache_dir"}),
        "model": model.path,
        "tokenizer": model.tokenizer_path,
        "weights": _describe_folder(model.path),
        "tokenizer_files": _describe_folder(model.tokenizer_path or model.path),
        "data_files": {str(path): _describe_file(path) for path in find_files(config.data.train_files)},
        "rollout": rollout.model_dump(mode="json", include=_RESPONSES_DEPEND_ON),
        "seed": config.trainer.seed,
    }


def _describe_folder(model: str) -> dict[str, list[int]]:
    """Return size and time of the files of a local model; nothing for a model on a hub."""
    files = sorted(Path(model).expanduser().glob("*.*"))
    return {file.name: _describe_file(file) for file in files if file.is_file()}


def _describe_file(file: Path) -> list[int]:
    return [file.stat().st_size, file.stat().st_mtime_ns]
