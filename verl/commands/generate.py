"""`verl generate` and `python -m verl.trainer.main_generation`: answers to the prompts of files, in a Parquet file.

The settings are those of `verl train`; the engines read the model themselves. What is done is kept in parts beside the
output, so that the command, given again, goes on where it was ended: every answer has a seed of its own, and those of a
run that was interrupted are the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.commands import SETTINGS_HELP
from verl.config.load import LoadedConfig, load_for_generation, split_arguments
from verl.config.schema import MISSING
from verl.config.schema.root import Config
from verl.errors import ConfigError, DataError
from verl.redaction import redact
from verl.tracking.console import Console

if TYPE_CHECKING:
    import pyarrow as pa

    from verl.data.dataset import PromptDataset
    from verl.rollout.replica_pool import EnginePool
    from verl.types import Completion, SamplingParams

__all__ = ["HELP", "main", "read_arguments"]

HELP = f"""\
usage: verl generate FILE... --output RESPONSES.parquet [settings]

Generate actor_rollout_ref.rollout.n responses to each prompt of the files, of at most data.max_response_length tokens,
sampled with actor_rollout_ref.rollout.{{temperature,top_p,top_k}}. The output has the rows of the files and the columns
responses, finish_reasons and response_lengths. Rerun the command to resume.

options:
  --output FILE           Parquet file to write (answers.parquet)
  --part N                prompts per part; finished parts are kept when the command is interrupted (256)

{SETTINGS_HELP}
example:
  verl generate test.parquet --output answers.parquet model.path=Qwen/Qwen2.5-0.5B-Instruct rollout.n=8
"""

_ANSWERS_DEPEND_ON = {"name", "n", "temperature", "top_p", "top_k", "dtype", "engine_kwargs", "max_model_len"}

FROM_DISK = -1
"""The version of weights that an engine has read itself."""


def read_arguments(argv: Sequence[str]) -> tuple[Path, int, LoadedConfig[Config]]:
    """The output, the size of a part, and the settings, with the files as data.train_files."""
    import argparse

    parser = argparse.ArgumentParser(prog="verl generate", add_help=False, allow_abbrev=False)
    parser.add_argument("--output", default="answers.parquet")
    parser.add_argument("--part", type=int, default=256)
    options, rest = parser.parse_known_args(list(argv))
    files, settings = split_arguments(rest)
    if files:
        settings.append(f"data.train_files={json.dumps(files)}")
    loaded = load_for_generation(settings)
    config = loaded.config
    wrong = []
    if config.data.train_files == MISSING:
        wrong.append("files: there is nothing to answer; name one, such as `verl generate test.parquet ...`")
    if config.actor_rollout_ref.model.path == MISSING:
        wrong.append("actor_rollout_ref.model.path: must be given")
    if options.part < 1:
        wrong.append(f"--part: {options.part} must be 1 or more")
    if Path(options.output).suffix not in (".parquet", ".pq"):
        mend = Path(options.output).with_suffix(".parquet")
        wrong.append(
            f"--output: {options.output} must end in .parquet or .pq, which is what is written: --output {mend}"
        )
    if wrong:
        raise ConfigError(wrong)
    return Path(options.output), options.part, loaded


def main(argv: Sequence[str]) -> int:
    """Generate what is not there yet; the exit code."""
    output, part, loaded = read_arguments(argv)
    if output.exists():
        raise ConfigError([f"--output: {output} is there already; take it away, or name another"])
    console = Console()
    for hint in loaded.hints:
        console.note(f"hint: {hint}")
    asyncio.run(generate(loaded.config, output, part, console))
    return 0


async def generate(config: Config, output: Path, part: int, console: Console) -> None:
    """Answer all prompts, part by part, and put the parts together."""
    from verl.cluster.hangs.pending_calls import MARGIN_S
    from verl.commands.parquet_writer import ParquetWriter
    from verl.rollout.replica_pool import EnginePool
    from verl.rollout.supervisor import EngineSupervisor
    from verl.tracking.metrics import Metrics
    from verl.trainer.build import place_engines
    from verl.trainer.restarts import RestartTracker
    from verl.trainer.run_data import check_files
    from verl.trainer.setup import resolve_path, start_runtime, with_changes
    from verl.trainer.worker_settings import deadlines

    check_files(config)
    dataset, sampling, text = _prompts(config)
    sheet = ParquetWriter(dataset)
    for note in (str(dataset.report), *sheet.notes):
        console.note(note)
    model = {"path": resolve_path(config.actor_rollout_ref.model.path)}
    config = with_changes(config, {"actor_rollout_ref": {"model": model}})
    parts = _Parts(output, _made_with(config) | {"part": part, "prompts": len(dataset)})
    todo = [start for start in range(0, len(dataset), part) if not parts.has(start)]
    if done := -(-len(dataset) // part) - len(todo):
        console.note(f"{done} parts of {part} prompts were there already, in {parts.folder}")
    async with AsyncExitStack() as closing:
        restarts, limits = RestartTracker(console, config.trainer.faults), deadlines(config)
        site = await closing.enter_async_context(start_runtime(config, console, restarts, Metrics()))
        engines = place_engines(config, site.pool, site.device, load_format="auto")
        for engine in engines:
            closing.push_async_callback(engine.close)
        await asyncio.gather(*(engine.start() for engine in engines))
        supervisor = EngineSupervisor(
            engines,
            restarts.engine,
            reply_timeout_s=limits.reply.seconds + MARGIN_S,
            start_timeout_s=limits.start.seconds + MARGIN_S,
            max_restarts=restarts.settings.max_engine_restarts,
        )

        async def sync_one(number: int) -> None:
            supervisor.mark_synced(number)
            await supervisor.mark_ready(number, FROM_DISK)

        for number in range(len(engines)):
            await supervisor.mark_ready(number, FROM_DISK)
        supervisor.start(sync_one)
        closing.push_async_callback(supervisor.close)
        pool = EnginePool(
            engines,
            stall_timeout_s=limits.generation.seconds + MARGIN_S,
            reply_timeout_s=limits.reply.seconds + MARGIN_S,
        )
        for start in todo:
            rows = range(start, min(start + part, len(dataset)))
            answering = asyncio.gather(*(_answers(config, dataset, row, pool, sampling) for row in rows))
            answered = zip(rows, await supervisor.run_while_available(answering), strict=True)
            parts.write(start, sheet.table([dataset.row(row) | _columns(answers, text) for row, answers in answered]))
            console.note(f"{rows.stop:,} of {len(dataset):,} prompts are answered")
    parts.finish()
    console.note(f"wrote {output}: {len(dataset):,} prompts, {config.actor_rollout_ref.rollout.n} answers each")


def _prompts(config: Config) -> tuple[PromptDataset, SamplingParams, Callable[[Sequence[int]], str]]:
    """The prompts, how they are answered, and what makes text of an answer."""
    from verl.data.dataset import PromptDataset
    from verl.trainer.run_data import find_stop_tokens, open_tokenizer
    from verl.types import SamplingParams

    model, rollout, data = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, config.data
    tokenizer = open_tokenizer(model, "actor_rollout_ref.model")
    dataset = PromptDataset(
        data.train_files,
        tokenizer,
        prompt_key=data.prompt_key,
        max_prompt_length=data.max_prompt_length,
        filter_overlong=data.filter_overlong_prompts,
        truncation=data.truncation,
        chat_template_kwargs=data.apply_chat_template_kwargs,
        max_samples=data.train_max_samples,
        num_workers=data.num_workers,
    )
    sampling = SamplingParams(
        data.max_response_length,
        rollout.temperature,
        rollout.top_p,
        rollout.top_k,
        find_stop_tokens(model.path, tokenizer),
    )
    return dataset, sampling, lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True))


async def _answers(
    config: Config, dataset: PromptDataset, row: int, pool: EnginePool, sampling: SamplingParams
) -> list[Completion]:
    prompt = dataset[row]
    assert prompt is not None, "nothing is streamed here"
    return await asyncio.gather(
        *(
            pool.generate(prompt.token_ids, replace(sampling, seed=_seed(config, prompt.row, number)))
            for number in range(config.actor_rollout_ref.rollout.n)
        )
    )


def _columns(answers: Sequence[Completion], text: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    return {
        "responses": [text(answer.token_ids) for answer in answers],
        "finish_reasons": [answer.finish_reason for answer in answers],
        "response_lengths": [len(answer.token_ids) for answer in answers],
    }


def _seed(config: Config, row: int, number: int) -> int:
    text = f"{config.trainer.seed}/generate/{row}/{number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def _made_with(config: Config) -> dict[str, Any]:
    """What answers depend on, settings and files: parts that were made otherwise do not belong together."""
    from verl.data.files import find_files

    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    return {
        "data": config.data.model_dump(mode="json", exclude={"num_workers", "cache_dir"}),
        "model": model.path,
        "tokenizer": model.tokenizer_path,
        "weights": _files_of(model.path),
        "tokenizer_files": _files_of(model.tokenizer_path or model.path),
        "data_files": {str(path): _state_of(path) for path in find_files(config.data.train_files)},
        "rollout": rollout.model_dump(mode="json", include=_ANSWERS_DEPEND_ON),
        "seed": config.trainer.seed,
    }


def _files_of(model: str) -> dict[str, list[int]]:
    """Size and time of each of a local model's files: one that was written anew is another. Nothing of a hub's."""
    files = sorted(Path(model).expanduser().glob("*.*"))
    return {file.name: _state_of(file) for file in files if file.is_file()}


def _state_of(file: Path) -> list[int]:
    return [file.stat().st_size, file.stat().st_mtime_ns]


class _Parts:
    """Finished parts beside the output: each is whole or not there; at the end they become one file."""

    def __init__(self, output: Path, made_with: dict[str, Any]) -> None:
        self._output, self.folder = output, output.with_name(f"{output.name}.parts")
        note = self.folder / "made_with.json"
        text = redact(json.dumps(made_with, indent=2, sort_keys=True))
        if note.exists() and note.read_text(encoding="utf-8") != text:
            raise DataError(
                f"{self.folder}: holds parts of a run with other settings or files (see {note.name} in it); take the "
                "folder away, or name another --output"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        note.write_text(text, encoding="utf-8")

    def has(self, start: int) -> bool:
        return self._path(start).exists()

    def write(self, start: int, rows: pa.Table) -> None:
        import pyarrow.parquet as pq

        temporary = self._path(start).with_suffix(".tmp")
        pq.write_table(rows, temporary)
        os.replace(temporary, self._path(start))

    def finish(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables = [pq.read_table(path) for path in sorted(self.folder.glob("*.parquet"))]
        temporary = self.folder / "whole.tmp"
        pq.write_table(pa.concat_tables(tables, promote_options="permissive"), temporary)
        os.replace(temporary, self._output)
        shutil.rmtree(self.folder)

    def _path(self, start: int) -> Path:
        return self.folder / f"{start:012d}.parquet"
