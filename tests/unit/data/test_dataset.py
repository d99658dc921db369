"""Prompts from files: what is read, what is dropped, what is said when it cannot be."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.data import files
from verl.data.chat import truncate
from verl.data.dataset import PromptDataset, PromptOptions
from verl.errors import DataError

pytestmark = pytest.mark.unit

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.name is defined %}!{% endif %}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if think %}~{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; it would add a start token if it were asked to."""
    from tokenizers.processors import TemplateProcessing

    marks = ["<user>", "<system>", "<assistant>", "</>", "<s>"]
    vocab = {
        chunk: place for place, chunk in enumerate(["?", *marks, *map(chr, range(32, 63)), *map(chr, range(64, 127))])
    }
    core = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("<(user|system|assistant|/|s)>|."), behavior="isolated")
    core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", bos_token="<s>", chat_template=TEMPLATE)


def text(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def write(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, **options)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_messages_and_finished_strings_take_the_same_path(tmp_path: Path, tokenizer: Any, suffix: str) -> None:
    chat = write(tmp_path / f"chat{suffix}", [{"prompt": user("1+1")}])
    finished = write(tmp_path / f"finished{suffix}", [{"prompt": "<user>1+1</><assistant>"}])
    first, second = PromptDataset([chat, finished], tokenizer, PromptOptions(max_prompt_length=20))
    assert first.token_ids == second.token_ids
    assert text(tokenizer, first.token_ids) == "<user>1+1</><assistant>"
    assert (first.row, second.row) == (0, 1)


def test_template_arguments_reach_the_template(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": user("1")}])
    [prompt] = PromptDataset(path, tokenizer, PromptOptions(max_prompt_length=20, chat_template_kwargs={"think": True}))
    assert text(tokenizer, prompt.token_ids) == "<user>1</><assistant>~"


def test_keys_that_parquet_filled_with_null_do_not_reach_the_template(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": user("1")}, {"prompt": [{**user("2")[0], "name": "x"}]}])
    prompts = PromptDataset(path, tokenizer, PromptOptions(max_prompt_length=20))
    assert [text(tokenizer, prompt.token_ids) for prompt in prompts] == [
        "<user>1</><assistant>",
        "<user>2!</><assistant>",
    ]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, ("", None, {})),
        ({"answer": "4", "data_source": "gsm8k"}, ("gsm8k", "4", {})),
        ({"ground_truth": "4", "answer": "2+2=4"}, ("", "4", {"answer": "2+2=4"})),
        (
            {"reward_model": {"style": "rule", "ground_truth": "4"}, "answer": "long", "extra_info": {"index": 3}},
            ("", "4", {"style": "rule", "answer": "long", "index": 3}),
        ),
        (
            {"reward_model": {"data_source": "math", "ground_truth": 4, "extra_info": {"level": 5}}},
            ("math", 4, {"level": 5}),
        ),
        ({"level": 1, "extra_info": {"level": 2}}, ("", None, {"level": 2})),
        ({"ground_truth": 0, "answer": "zero"}, ("", 0, {"answer": "zero"})),
    ],
)
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_reward_function_gets_all_columns(
    tmp_path: Path, tokenizer: Any, suffix: str, columns: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    path = write(tmp_path / f"a{suffix}", [{"prompt": "1", **columns}])
    [prompt] = PromptDataset(path, tokenizer, PromptOptions(max_prompt_length=20))
    assert (prompt.data_source, prompt.ground_truth, prompt.extra_info) == expected


def test_overlong_prompts_are_dropped_and_reported(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": "1" * n} for n in (3, 9, 4, 8)])
    dataset = PromptDataset(path, tokenizer, PromptOptions(max_prompt_length=4))
    assert len(dataset) == 2
    assert [prompt.row for prompt in dataset] == [0, 2]
    report = dataset.report
    assert (report.rows, report.overlong, report.truncated, report.kept) == (4, 2, 0, 2)
    assert str(report) == "a.parquet: 4 rows, 2 dropped for being longer than 4 tokens, 2 kept"


@pytest.mark.parametrize(("side", "left"), [("left", "3456"), ("right", "1234"), ("middle", "1256")])
def test_overlong_prompts_are_truncated_if_the_settings_say_so(
    tmp_path: Path, tokenizer: Any, side: str, left: str
) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "123456"}, {"prompt": "12"}])
    dataset = PromptDataset(path, tokenizer, PromptOptions(max_prompt_length=4, filter_overlong=False, truncation=side))
    assert [text(tokenizer, prompt.token_ids) for prompt in dataset] == [left, "12"]
    assert str(dataset.report) == "a.jsonl: 2 rows, 1 truncated to 4 tokens, 2 kept"


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("limit", [1, 2, 5, 9, 10, 11])
def test_truncation_keeps_exactly_the_limit_and_the_order(side: str, limit: int) -> None:
    kept = truncate(list(range(10)), limit, side)
    assert len(kept) == min(limit, 10)
    assert kept == sorted(kept)


def test_what_must_not_be_truncated_is_an_error() -> None:
    assert truncate([1, 2], 2, "error") == [1, 2]
    with pytest.raises(DataError, match="3 tokens are more than the limit of 2"):
        truncate([1, 2, 3], 2, "error")


def test_overlong_prompts_are_refused_at_start_by_default(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": "1" * 9}, {"prompt": "1" * 8}])
    with pytest.raises(DataError, match=r"a.jsonl, line 2: the prompt has 9 tokens.*=4, as do 1 others.*filter"):
        PromptDataset(path, tokenizer, PromptOptions(max_prompt_length=4, filter_overlong=False))


def test_kept_rows_of_another_process_spare_the_pass(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": "1" * n} for n in (3, 9, 4, 8)])
    first = PromptDataset(path, tokenizer, PromptOptions(max_prompt_length=4))
    calls: list[Any] = []

    def counting(texts: list[str], **options: Any) -> Any:
        calls.append(texts)
        return tokenizer(texts, **options)

    second = PromptDataset(path, counting, PromptOptions(max_prompt_length=4), kept=first.kept)  # type: ignore[arg-type]
    assert calls == []
    assert second.report == first.report
    assert list(second) == list(first)
    assert calls == [["111"], ["1111"]]


def test_max_samples_takes_the_first_rows_over_all_files(tmp_path: Path, tokenizer: Any) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(3)]) for name in "abc"]
    dataset = PromptDataset(paths, tokenizer, PromptOptions(max_prompt_length=9, max_samples=4))
    assert [text(tokenizer, prompt.token_ids) for prompt in dataset] == ["a0", "a1", "a2", "b0"]
    assert dataset.report.rows == 4


def test_patterns_and_the_home_folder_are_expanded(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in "ba":
        write(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    dataset = PromptDataset("~/*.jsonl", tokenizer, PromptOptions(max_prompt_length=9))
    assert [text(tokenizer, prompt.token_ids) for prompt in dataset] == ["a", "b"]


def test_row_groups_are_read_on_demand_and_evicted_from_a_full_cache(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": str(i)} for i in range(10)], row_group_size=3)
    rows = files.ParquetRows(path, files.BlockCache())
    read: list[int] = []
    original = rows._file.read_row_group
    monkeypatch.setattr(rows._file, "read_row_group", lambda group, **kw: read.append(group) or original(group, **kw))
    assert [rows.row(i)["prompt"] for i in (4, 5, 9, 4)] == ["4", "5", "9", "4"]
    assert read == [1, 3]
    monkeypatch.setattr(files, "CACHED_BYTES", 1)
    assert [rows.row(i)["prompt"] for i in (0, 4, 0)] == ["0", "4", "0"]
    assert read == [1, 3, 0, 1, 0]
    assert [value for values in rows.values("prompt") for value in values] == [str(i) for i in range(10)]


def test_long_files_are_measured_in_pieces(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "READ_AT_ONCE", 4)
    lengths = [1 + (7 * i) % 5 for i in range(30)]
    rows = [{"prompt": "1" * n} for n in lengths]
    paths = [write(tmp_path / "a.jsonl", rows[:13]), write(tmp_path / "b.parquet", rows[13:])]
    dataset = PromptDataset(paths, tokenizer, PromptOptions(max_prompt_length=3, max_samples=25))
    assert dataset.kept.tolist() == np.flatnonzero(np.array(lengths[:25]) <= 3).tolist()
    assert [len(prompt.token_ids) for prompt in dataset] == [n for n in lengths[:25] if n <= 3]


def test_blank_lines_are_not_rows_and_lines_keep_their_numbers(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"prompt": "1"}\n  \n{"prompt": "2"')
    with pytest.raises(DataError, match=r"a.jsonl, line 4: not valid JSON"):
        PromptDataset(path, tokenizer, PromptOptions(max_prompt_length=9))
    path.write_text('\n{"prompt": "1"}\n  \n{"prompt": "2"}')
    assert len(PromptDataset(path, tokenizer, PromptOptions(max_prompt_length=9))) == 2


def refusal(path: Any, tokenizer: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        PromptDataset(path, tokenizer, PromptOptions(**{"max_prompt_length": 9, **options}))
    return str(caught.value)


def test_the_error_about_a_missing_file_lists_its_folder(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path / "train.parquet", [{"prompt": "1"}])
    (tmp_path / "old").mkdir()
    said = refusal(tmp_path / "trian.parquet", tokenizer)
    assert said == (
        f"data file not found: {tmp_path}/trian.parquet does not exist; {tmp_path} contains: old/, train.parquet. "
        f"Did you mean {tmp_path}/train.parquet?"
    )
    assert f"; {tmp_path}/none/deep does not exist. Set" in refusal(tmp_path / "none" / "deep" / "x.parquet", tokenizer)
    assert "is a folder" in refusal(tmp_path, tokenizer)
    assert "matches no file" in refusal(tmp_path / "*.jsonl", tokenizer)
    assert "no data files are given" in refusal([], tokenizer)


def test_the_error_about_a_missing_column_suggests_a_likely_one(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.parquet", [{"question": "1", "answer": "2"}])
    assert refusal(path, tokenizer) == (
        f"column 'prompt' not found in {path}; it has: question, answer. Set data.prompt_key=question"
    )
    path = write(tmp_path / "b.jsonl", [{"prompts": "1"}])
    assert refusal(path, tokenizer).endswith("Set data.prompt_key=prompts")
    path = write(tmp_path / "c.jsonl", [{"x": "1"}])
    assert refusal(path, tokenizer).endswith("Set data.prompt_key to the column with the prompts")


def test_if_all_prompts_are_too_long_the_error_names_the_limit_needed(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": "1" * 12}, {"prompt": "1" * 10}])
    assert refusal(path, tokenizer) == (
        "a.parquet: all 2 prompts are longer than data.max_prompt_length=9 (the shortest has 10 tokens, the longest "
        "12). Set data.max_prompt_length=12 to keep them all"
    )


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (7, "the prompt is of type int; it must be a string or a list of messages"),
        (None, "the prompt is missing"),
        ("", "the prompt is an empty string"),
        ([], "the prompt is an empty list"),
        (json.dumps(user("1")), "the prompt is text that holds chat messages"),
        (str(user("1")), "the prompt is text that holds chat messages"),
        (["hello"], "the prompt is a list that holds str"),
        ([{"role": "user"}], "message 0 of the prompt has no content, only role"),
        ([{"role": "user", "content": "x"}, {"from": "y"}], "message 1 of the prompt has no content and no role, only"),
    ],
)
def test_a_prompt_of_the_wrong_kind_is_named_with_its_place(
    tmp_path: Path, tokenizer: Any, prompt: Any, said: str
) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": prompt}])
    message = refusal(path, tokenizer)
    assert message.startswith(f"{path}, line 2, column 'prompt': {said}")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_prompt_of_no_tokens_is_refused_with_its_place(tmp_path: Path, streaming: bool) -> None:
    core = Tokenizer(models.WordLevel({"?": 0, "one": 1}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?")
    path = write(tmp_path / "a.jsonl", [{"prompt": "one"}, {"prompt": "  "}])
    with pytest.raises(
        DataError, match=r"line 2, column 'prompt': the tokenizer returns no tokens for '  '; remove the"
    ):
        list(PromptDataset(path, words, PromptOptions(max_prompt_length=9, streaming=streaming)))


def test_messages_without_a_chat_template_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="?")
    path = write(tmp_path / "a.parquet", [{"prompt": user("1")}])
    assert "has no chat template; use a model that has one" in refusal(path, bare)


def test_messages_that_the_template_does_not_take_are_named_with_their_roles(tmp_path: Path, tokenizer: Any) -> None:
    strict = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        unk_token="?",
        chat_template="{{ raise_exception('System role not supported') }}",
    )
    path = write(tmp_path / "a.parquet", [{"prompt": [{"role": "system", "content": "x"}, *user("1")]}])
    message = refusal(path, strict)
    assert (
        "does not accept these messages (roles: system, user): System role not supported; fix the messages" in message
    )


def test_the_data_source_may_be_a_column_or_a_field_of_reward_model(tmp_path: Path, tokenizer: Any) -> None:
    first = write(tmp_path / "a.jsonl", [{"prompt": "1", "data_source": "sums"}])
    second = write(tmp_path / "b.parquet", [{"prompt": "1", "reward_model": {"data_source": "gsm8k"}}])
    third = write(tmp_path / "c.jsonl", [{"prompt": "1"}])
    dataset = PromptDataset([first, second, third], tokenizer, PromptOptions(max_prompt_length=9))
    assert dataset.sources() == [prompt.data_source for prompt in dataset] == ["sums", "gsm8k", ""]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_every_row_is_asked_for_its_data_source(tmp_path: Path, tokenizer: Any, suffix: str) -> None:
    rows = [
        {"prompt": "1"},
        {"prompt": "1", "data_source": "sums"},
        {"prompt": "1", "reward_model": {"data_source": "gsm8k"}},
    ]
    schema = {"schema": pa.schema({"prompt": pa.string(), "data_source": pa.string(), "reward_model": STRUCT})}
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows, **schema), path)
    else:
        write(path, rows)
    dataset = PromptDataset(path, tokenizer, PromptOptions(max_prompt_length=9))
    assert dataset.sources() == [prompt.data_source for prompt in dataset] == ["", "sums", "gsm8k"]


STRUCT = pa.struct({"data_source": pa.string()})


def test_lines_of_json_may_have_columns_that_the_first_line_lacks(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "READ_AT_ONCE", 2)
    path = write(tmp_path / "a.jsonl", [{"other": 1}, {"prompt": "1"}, {"prompt": "2", "late": 3}])
    rows = files.open_rows(path)
    assert rows.columns == ["other", "prompt"]
    assert [rows.has(name) for name in ("other", "prompt", "late", "never")] == [True, True, True, False]
    assert "line 1, column 'prompt': the prompt is missing" in refusal(path, tokenizer), "and not the column"
    whole = write(tmp_path / "b.jsonl", [{"prompt": "1"}, {"prompt": "2", "level": 3}])
    assert PromptDataset(whole, tokenizer, PromptOptions(max_prompt_length=9)).column("level") == [None, 3]
    assert "column 'question' not found" in refusal(path, tokenizer, prompt_key="question")


def test_a_reward_model_column_written_as_text_is_refused_with_its_place(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": "1", "reward_model": '{"ground_truth": "4"}'}])
    with pytest.raises(DataError, match=r"row 0: column 'reward_model' holds text.*without json.dumps"):
        PromptDataset(path, tokenizer, PromptOptions(max_prompt_length=9))[0]


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.csv").write_text("prompt\n1\n")
    assert "ends in '.csv'; data files are .parquet or .jsonl" in refusal(tmp_path / "a.csv", tokenizer)
    (tmp_path / "a.parquet").write_text("no parquet")
    assert "cannot be read as Parquet" in refusal(tmp_path / "a.parquet", tokenizer)
    (tmp_path / "a.json").write_text('[{"prompt": "1"}]')
    assert "line 1: holds a list; each line must be one JSON object" in refusal(tmp_path / "a.json", tokenizer)
    (tmp_path / "a.jsonl").write_text("\n")
    assert "no rows" in refusal(tmp_path / "a.jsonl", tokenizer)


@pytest.fixture
def teacher(tokenizer: PreTrainedTokenizerFast) -> Any:
    """The same tokens, but its template begins with a message of the system."""
    made = copy.deepcopy(tokenizer)
    made.chat_template = "<system>Help</>" + TEMPLATE
    return made


@pytest.mark.parametrize("streaming", [False, True])
def test_messages_are_also_rendered_in_the_template_of_a_teacher(
    tmp_path: Path, tokenizer: Any, teacher: Any, streaming: bool
) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": user("1+1")}])
    options = PromptOptions(max_prompt_length=20, chat_template_kwargs={"think": True}, streaming=streaming)
    [prompt] = PromptDataset(path, tokenizer, options, teacher=teacher)
    assert text(tokenizer, prompt.token_ids) == "<user>1+1</><assistant>~"
    assert prompt.teacher_token_ids is not None
    assert text(tokenizer, prompt.teacher_token_ids) == "<system>Help</><user>1+1</><assistant>~"
    [without] = PromptDataset(path, tokenizer, options)
    assert without.teacher_token_ids is None


def test_a_string_has_the_same_tokens_for_a_teacher(tmp_path: Path, tokenizer: Any, teacher: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "<user>1+1</><assistant>"}])
    [prompt] = PromptDataset(path, tokenizer, PromptOptions(max_prompt_length=20), teacher=teacher)
    assert prompt.teacher_token_ids == prompt.token_ids


@pytest.mark.parametrize("streaming", [False, True])
def test_the_longer_of_both_renderings_counts(tmp_path: Path, tokenizer: Any, teacher: Any, streaming: bool) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": user("1")}, {"prompt": user("1+1")}])
    options = PromptOptions(max_prompt_length=10, streaming=streaming)
    for _ in range(2):  # measured, and from the cache
        kept = PromptDataset(path, tokenizer, options, cache_dir=tmp_path / "cache", teacher=teacher)
        assert [prompt.row for prompt in kept] == [0]
        both = PromptDataset(path, tokenizer, options, cache_dir=tmp_path / "cache")
        assert [prompt.row for prompt in both] == [0, 1]
    strict = PromptOptions(max_prompt_length=10, streaming=streaming, filter_overlong=False)
    with pytest.raises(DataError, match=r"12 tokens in the longer of .* Raise it, or set data.filter_overlong_prompts"):
        list(PromptDataset(path, tokenizer, strict, teacher=teacher))
