"""The prompts: the tokenizer and its chat template, the length and the columns of every row, tools and agents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from verl.config.batch_sizes import get_max_sequence_tokens
from verl.config.features import data_splits
from verl.config.schema import Config
from verl.data.chat import chat_template_hint
from verl.data.files import Files, FileSet
from verl.data.inspection import DataInspector, InspectionReport
from verl.errors import VerlError
from verl.models.model_folder import read_config, text_config
from verl.models.model_support import packing_length_problem
from verl.preflight.finding import Finding, Severity
from verl.preflight.tokenizer import open_policy_tokenizer
from verl.rewards.reward_function import explain_no_scorer, resolve_scorer
from verl.trainer.build.data import check_rows, open_agents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AGENT_ROWS = 256
"""Rows of each split whose agents and tools are checked."""
MANY_DROPPED = 0.1
_LENGTHS = "data.max_prompt_length + data.max_response_length"


@dataclass(slots=True)
class PromptCheck:
    """What is wrong with the prompts, and how many of how many rows were read within the time."""

    findings: list[Finding] = field(default_factory=list)
    rows: int = 0
    total: int = 0

    def __str__(self) -> str:
        every = "all" if self.rows == self.total else f"the first {self.rows:,} of"
        return f"{every} {self.total:,} rows against template and limits"


def check_prompts(config: Config, seconds: float) -> PromptCheck:
    """Read the rows of all data files for about `seconds`, as a run would read them."""
    result = PromptCheck()
    tokenizer = open_policy_tokenizer(config)
    result.findings += find_length_findings(config)
    agents, tools = None, list[dict[str, Any]]()
    if config.actor_rollout_ref.rollout.multi_turn.enable:
        agents = open_agents(config, tokenizer)
        tools = agents.list_schemas()
    splits = data_splits(config)
    for split, files in splits.items():
        inspector = _open_inspector(config, files, tokenizer, tools)
        report = inspector.inspect(
            max_prompt_length=config.data.max_prompt_length,
            is_overlong_fatal=config.data.truncation == "error" and not config.data.filter_overlong_prompts,
            seconds=seconds / len(splits),
        )
        result.findings += _describe_rows(config, split, report)
        result.rows += report.rows
        result.total += inspector.total_rows
        if agents is not None:
            try:
                check_rows([FirstRows(files, config.data.prompt_key)], agents)
            except VerlError as error:
                texts = getattr(error, "problems", None) or str(error).splitlines()
                result.findings += [Finding.from_message(text, place=f"data.{split}_files") for text in texts]
        if split == "train" and (hint := _read_template_hint(config, inspector, tokenizer)):
            result.findings.append(Finding.from_message(hint, Severity.WARNING, "data.apply_chat_template_kwargs"))
    return result


class FirstRows(FileSet):
    """The first rows of some files, as columns."""

    def __init__(self, files: Files, prompt_key: str) -> None:
        super().__init__(files)
        self._prompt_key = prompt_key

    def iter_fields(self, names: Sequence[str]) -> Iterator[tuple[int, Any, dict[str, Any]]]:
        """Yield the number, the prompt and other columns of every row."""
        for number in range(min(self.total_rows, AGENT_ROWS)):
            file, index = self.locate(number)
            row = file.row(index)
            yield number, row.get(self._prompt_key), {name: row[name] for name in names if row.get(name) is not None}


def find_length_findings(config: Config) -> Iterator[Finding]:
    """Yield sequences that are longer than the positions of the model."""
    path, longest = config.actor_rollout_ref.model.path, get_max_sequence_tokens(config)
    content = text_config(read_config(path))
    if content and (problem := packing_length_problem(path, content, longest, _LENGTHS)):
        yield Finding.from_message(problem)
    limit = content.get("max_position_embeddings")
    if isinstance(limit, int) and longest > limit:
        yield Finding(
            Severity.ERROR,
            _LENGTHS,
            f"sequences may have {longest:,} tokens, but {path} has {limit:,} positions",
            f"set data.max_response_length={limit - config.data.max_prompt_length}"
            if limit > config.data.max_prompt_length
            else f"set both to at most {limit:,} together",
        )


def _open_inspector(
    config: Config, files: Files, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]]
) -> DataInspector:
    return DataInspector(
        files,
        prompt_key=config.data.prompt_key,
        tokenizer=tokenizer,
        template_kwargs={**config.data.apply_chat_template_kwargs, **({"tools": tools} if tools else {})},
        describe_scorer=partial(resolve_scorer, config),
        explain_no_scorer=explain_no_scorer,
    )


def _describe_rows(config: Config, split: str, report: InspectionReport) -> Iterator[Finding]:
    place = f"data.{split}_files"
    for problem in report.problems:
        severity = Severity.ERROR if problem.fatal else Severity.WARNING
        finding = Finding.from_message(problem.text, severity, place)
        if problem.fix:
            finding = Finding(severity, place, problem.text, problem.fix)
        yield finding if finding.fix else replace(finding, fix="check that the files belong together")
    limit, lengths = config.data.max_prompt_length, report.lengths
    long = int((lengths > limit).sum())
    if not long or (config.data.truncation == "error" and not config.data.filter_overlong_prompts):
        return  # an error among the problems
    share = f"{long:,} of {len(lengths):,} prompts are longer than data.max_prompt_length={limit}"
    fix = f"set data.max_prompt_length={lengths.max()} to keep all"
    if not config.data.filter_overlong_prompts:
        yield Finding(Severity.WARNING, place, f"{share} and are cut (data.truncation={config.data.truncation})", fix)
    elif long == len(lengths):
        yield Finding(Severity.ERROR, place, f"{share} and are dropped: none is left", fix)
    elif long > MANY_DROPPED * len(lengths):
        yield Finding(Severity.WARNING, place, f"{share} and are dropped", fix)


def _read_template_hint(config: Config, rows: DataInspector, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the hint that a run prints about the chat template, from the first prompt."""
    file, index = rows.locate(0)
    try:
        return chat_template_hint(
            tokenizer, file.row(index)[config.data.prompt_key], config.data.apply_chat_template_kwargs
        )
    except (VerlError, KeyError):  # reported with the rows
        return None
