"""The data of a run as configured: order, checks and reports."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import CHAT_TEMPLATE, FAMILIES, chat_tokenizer, save_family, tiny_qwen2

from verl.config.load import load_dict
from verl.config.schema.actor import ModelConfig
from verl.config.schema.root import Config
from verl.data import files as files_module
from verl.data.chat import chat_template_hint
from verl.data.samplers import Sampler
from verl.errors import ConfigError, DataError, RewardError
from verl.trainer.build.data import open_tokenizer, read_data
from verl.trainer.build.preflight import check_files

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    chat_tokenizer().save_pretrained(folder)
    tiny_qwen2(vocab_size=127).save_pretrained(folder)
    return folder


def write(path: Path, rows: int, **columns: Any) -> str:
    shared = {"prompt": [f"{path.stem}{n}" for n in range(rows)], "data_source": ["addition"] * rows}
    pq.write_table(pa.table({**shared, **columns}), path, row_group_size=4)
    return str(path)


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Any:
    def made(**data: Any) -> Config:
        given = {"max_prompt_length": 8, "cache_dir": str(tmp_path / "cache"), "seed": 3, **data}
        return load_dict({"data": given, "actor_rollout_ref": {"model": {"path": str(model)}}}).config

    return made


def rows(order: Sampler, count: int | None = None) -> list[int]:
    return [order.row(position) for position in range(order.length if count is None else count)]


@pytest.mark.parametrize("streaming", [False, True])
def test_each_row_comes_once_per_epoch_shuffled_or_in_order(tmp_path: Path, config: Any, streaming: bool) -> None:
    files = [write(tmp_path / "a.parquet", 9), write(tmp_path / "b.parquet", 6)]
    shuffled = read_data(config(train_files=files, streaming=streaming)).order
    assert sorted(rows(shuffled)) == list(range(15))
    assert rows(shuffled) != list(range(15))
    still = read_data(config(train_files=files, streaming=streaming, shuffle=False)).order
    assert rows(still) == list(range(15))


@pytest.mark.parametrize("streaming", [False, True])
def test_weights_are_shares_of_the_entries(tmp_path: Path, config: Any, streaming: bool) -> None:
    for name, count in (("a1", 3), ("a2", 4), ("b", 5)):
        write(tmp_path / f"{name}.parquet", count)
    files = [str(tmp_path / "a*.parquet"), str(tmp_path / "b.parquet")]
    order = read_data(config(train_files=files, train_weights=[1, 3], streaming=streaming)).order
    assert order.length == 12
    drawn = rows(order, 40)
    assert Counter(row >= 7 for row in drawn) == {True: 30, False: 10}
    first = [row for row in drawn if row >= 7][:5]
    assert sorted(first) == [7, 8, 9, 10, 11], "each file goes through its own epochs"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_weight_for_a_file_without_rows_is_refused(tmp_path: Path, config: Any, streaming: bool) -> None:
    files = [write(tmp_path / "a.parquet", 3), write(tmp_path / "b.parquet", 3)]
    settings = {"train_files": files, "train_weights": [1, 1], "train_max_samples": 3, "streaming": streaming}
    with pytest.raises(DataError, match=r"b\.parquet: no rows are left of it.*train_weights.*train_max_samples"):
        read_data(config(**settings))


def test_a_curriculum_counts_only_the_rows_that_were_kept(tmp_path: Path, config: Any) -> None:
    path = write(tmp_path / "a.parquet", 5, prompt=["1", "1" * 20, "1", "1", "1"], level=[4.0, 0.0, 1.0, 3.0, 2.0])
    order = read_data(config(train_files=path, curriculum_key="level", filter_overlong_prompts=True)).order
    assert rows(order) == [1, 3, 2, 0], "of the four that are left"
    both = [path, write(tmp_path / "b.parquet", 2, level=[9, 7])]
    order = read_data(
        config(train_files=both, train_weights=[2, 1], curriculum_key="level", filter_overlong_prompts=True)
    ).order
    drawn = rows(order, 6)
    assert [row for row in drawn if row < 4] == [1, 3, 2, 0]
    assert [row for row in drawn if row >= 4] == [5, 4]


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ([1.0, None, 2.0], r"a\.parquet, row 1, column 'level': None is not a finite number"),
        ([1.0, 2.0, float("nan")], r"row 2, column 'level': nan is no"),
        (["1", "2", "3"], r"row 0, column 'level': '1' is not a finite number.*data\.curriculum_key"),
        ([True, False, True], r"row 0, column 'level': True is no"),
    ],
)
def test_a_curriculum_column_that_is_not_numeric_names_the_row(
    tmp_path: Path, config: Any, levels: list[Any], said: str
) -> None:
    path = write(tmp_path / "a.parquet", 3, level=levels)
    with pytest.raises(DataError, match=said):
        read_data(config(train_files=path, curriculum_key="level"))


def test_a_sampler_from_a_file_sees_the_columns(tmp_path: Path, config: Any) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        "def odd(epoch, seed, rows, column):\n    return [r for r, v in enumerate(column('level')) if v % 2]\n"
    )
    path = write(tmp_path / "a.parquet", 4, level=[3, 2, 1, 0])
    made = config(train_files=path, sampler=f"{code}:odd")
    check_files(made)
    assert rows(read_data(made).order) == [0, 2]
    with pytest.raises(ConfigError, match=r"data\.sampler: .*:even' cannot be imported"):
        check_files(config(train_files=path, sampler=f"{code}:even"))


def test_a_built_in_sampler_by_scores_and_its_arguments(tmp_path: Path, config: Any) -> None:
    path = write(tmp_path / "a.parquet", 6)
    given = config(train_files=path, sampler="replay", sampler_kwargs={"fraction": 0.5})
    check_files(given)
    order = read_data(given).order
    assert order.is_adaptive
    assert sorted(rows(order)) == list(range(6))
    assert order.identity()["sampler_kwargs"] == {"fraction": 0.5}
    with pytest.raises(ConfigError, match=r"data\.sampler_kwargs: fraction=2"):
        read_data(config(train_files=path, sampler="replay", sampler_kwargs={"fraction": 2}))
    with pytest.raises(ConfigError, match=r"replay cannot be called with .* unexpected keyword argument 'target'"):
        check_files(config(train_files=path, sampler="replay", sampler_kwargs={"target": 2}))
    with pytest.raises(ConfigError, match="'reply' is not one of difficulty, replay, nor"):
        check_files(config(train_files=path, sampler="reply"))


def test_a_custom_class_sees_the_columns_and_a_function_its_arguments(tmp_path: Path, config: Any) -> None:
    path = write(tmp_path / "a.parquet", 4, level=[3, 0, 2, 1])
    code = tmp_path / "by_level.py"
    code.write_text(
        "class Levels:\n"
        "    def __init__(self, rows, seed, column, start=0):\n"
        "        self.order, self.start = column('level'), start\n"
        "    def row(self, position): return self.order[(self.start + position) % 4]\n"
        "    def record(self, row, scores): self.start += 1\n"
        "    def state(self): return {'start': self.start}\n"
        "    def load_state(self, state): self.start = state['start']\n"
        "def reverse(epoch, seed, rows, column, *, step=1): return list(range(rows - 1, -1, -step))\n"
    )
    order = read_data(config(train_files=path, sampler=f"{code}:Levels", sampler_kwargs={"start": 1})).order
    assert rows(order) == [0, 2, 1, 3]
    order.record(0, [1.0])
    assert order.row(0) == 2
    assert rows(read_data(config(train_files=path, sampler=f"{code}:reverse", sampler_kwargs={"step": 2})).order) == [
        3,
        1,
    ]


def test_large_files_are_streamed_unless_their_order_needs_all_rows(
    tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", 12, level=list(range(12)))
    monkeypatch.setattr(files_module, "STREAMED_ROWS", 12)
    data = read_data(config(train_files=path, val_files=path))
    assert data.datasets["train"].options.streaming
    assert not data.datasets["val"].options.streaming, "validation is measured"
    assert data.datasets["train"].kept == range(12)
    assert "a.parquet: 12 rows, streamed" in data.reports[0]
    assert "will stop the run when it is reached" in data.reports[1]
    assert not read_data(config(train_files=path, streaming=False)).datasets["train"].options.streaming
    ranked = read_data(config(train_files=path, curriculum_key="level"))
    assert rows(ranked.order) == list(range(12))


def test_a_shuffle_buffer_that_exceeds_the_cache_is_reported(
    tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.trainer.build import data as module

    monkeypatch.setattr(module, "CACHED_BYTES", 1000)
    path = write(tmp_path / "a.parquet", 12)
    settings = {"train_files": path, "streaming": True, "filter_overlong_prompts": True}
    [_, said, _] = read_data(config(**settings)).reports
    assert "data.shuffle_buffer_size=16,384 rows do not fit into the" in said
    fitting = int(said.rpartition("=")[2])
    assert len(read_data(config(**settings, shuffle_buffer_size=fitting)).reports) == 2


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_source_without_a_scorer_is_found_before_the_run(tmp_path: Path, config: Any, streaming: bool) -> None:
    path = write(tmp_path / "a.parquet", 3, data_source=["nobody knows"] * 3)
    with pytest.raises(RewardError, match="nobody knows"):
        read_data(config(train_files=path, streaming=streaming))


@pytest.mark.parametrize("streaming", [False, True])
def test_all_problems_of_the_files_are_reported_at_once(tmp_path: Path, config: Any, streaming: bool) -> None:
    good = write(tmp_path / "good.parquet", 2, level=[1, 2])
    pq.write_table(pa.table({"question": ["1"]}), tmp_path / "other.parquet")
    empty = write(tmp_path / "empty.parquet", 0)
    (tmp_path / "text.parquet").write_text("nothing")
    files = [
        good,
        str(tmp_path / "other.parquet"),
        empty,
        str(tmp_path / "text.parquet"),
        str(tmp_path / "goood.parquet"),
    ]
    extra = {} if streaming else {"curriculum_key": "level"}
    with pytest.raises(DataError) as caught:
        check_files(config(train_files=files, train_weights=[1] * 5, val_files=files[1], streaming=streaming, **extra))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{6 - streaming} things are wrong with the data:"
    said = "\n".join(lines)
    assert "empty.parquet: no rows, but a weight in data.train_weights" in said
    assert "text.parquet cannot be read as Parquet" in said
    assert f"Did you mean {good}?" in said
    assert said.count("column 'prompt' not found in") == 2
    assert "it has: question. Set data.prompt_key=question" in said
    assert ("column 'level' not found in" in said) == (not streaming)


def test_a_single_problem_is_reported_without_a_list(tmp_path: Path, config: Any) -> None:
    path = write(tmp_path / "a.parquet", 2, difficulty=[1, 2])
    with pytest.raises(DataError, match=r"^column 'level' not found in .*Set data\.curriculum_key=difficulty$"):
        check_files(config(train_files=path, curriculum_key="level"))
    with pytest.raises(DataError, match=r"empty\.parquet: no rows; fill the file"):
        check_files(config(train_files=write(tmp_path / "empty.parquet", 0)))


def test_files_unlike_the_first_and_empty_ones_are_mentioned(tmp_path: Path, config: Any) -> None:
    files = [
        write(tmp_path / "a.parquet", 2, level=[1, 2]),
        write(tmp_path / "b.parquet", 2, kind=["x", "y"]),
        write(tmp_path / "c.parquet", 0),
    ]
    [_, empty, unlike, _] = read_data(config(train_files=files)).reports
    assert empty.endswith("c.parquet has no rows")
    assert unlike.endswith(
        "b.parquet lacks level and also has kind, unlike a.parquet; reward functions get the columns of each row"
    )


def test_many_files_with_the_same_problem_are_summarized(tmp_path: Path, config: Any) -> None:
    for number in range(20):
        pq.write_table(pa.table({"question": ["1"]}), tmp_path / f"{number:02}.parquet")
    with pytest.raises(DataError) as caught:
        check_files(config(train_files=str(tmp_path / "*.parquet")))
    assert len(str(caught.value).splitlines()) == 7
    assert "... and 15 more files" in str(caught.value)


def test_the_seed_of_the_data_defaults_to_that_of_the_run(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path / "a.parquet", 30)

    def order(**given: Any) -> list[int]:
        sections = {"data": {"train_files": path, "seed": given.get("data")}, "trainer": {"seed": given.get("run", 1)}}
        loaded = load_dict({**sections, "actor_rollout_ref": {"model": {"path": str(model)}}})
        return rows(read_data(loaded.config).order)

    assert order(data=5) == order(data=5, run=7) != order(run=7)
    assert order(run=7) == order(data=7)
    assert np.array_equal(sorted(order(run=7)), np.arange(30))


def test_a_misspelled_folder_lists_what_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(path: str, **_: object) -> None:
        raise OSError("cannot reach the hub")

    (tmp_path / "demo" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", offline)
    with pytest.raises(
        ConfigError, match=r"cannot reach the hub\ndid you mean demo/model\? demo/modle is not a local folder"
    ):
        open_tokenizer(ModelConfig(path="demo/modle"), "model")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path, family: str) -> None:
    path = save_family(family, tmp_path / "model")
    with pytest.raises(ConfigError, match=r"model\.path=.*: no tokenizer found: "):
        open_tokenizer(ModelConfig(path=path), "model")
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path=.*: no tokenizer found: "):
        open_tokenizer(ModelConfig(path="some/model", tokenizer_path=path), "model")
    chat_tokenizer().save_pretrained(path)
    assert len(open_tokenizer(ModelConfig(path=path), "model")) >= 127


def test_string_prompts_get_a_hint_if_the_chat_template_would_change_them(tmp_path: Path, config: Any) -> None:
    def hints(prompts: list[Any], **settings: Any) -> list[str]:
        path = write(tmp_path / "a.parquet", len(prompts), prompt=prompts)
        reports = read_data(config(train_files=path, max_prompt_length=64, **settings)).reports
        return [report for report in reports if report.startswith("hint: ")]

    [hint] = hints(["1+1="])
    assert "prompts are strings, so the chat template of" in hint
    assert '[{"role": "user", "content": "..."}]' in hint
    assert hints(["1+1="], streaming=True) == [hint]
    assert hints([[{"role": "user", "content": "1+1="}]]) == []
    assert hints(["<|start|>user\n1+1=<|end|>"]) == [], "rendered already"


@pytest.mark.parametrize("template", [None, "{% for message in messages %}{{ message['content'] }}{% endfor %}"])
def test_string_prompts_that_no_template_would_change_get_no_hint(template: str | None) -> None:
    assert chat_template_hint(chat_tokenizer(template), "1+1=", {}) is None


CHAT = [[{"role": "user", "content": "1+1"}]] * 3


def read_with_teacher(folder: Path, config: Any, template: str | None, *, is_used: bool, **columns: Any) -> Any:
    """Read data for a teacher with this chat template and the policy's tokens."""
    teacher, tokenizer = folder / "teacher", chat_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(teacher)
    tiny_qwen2(vocab_size=128).save_pretrained(teacher)
    settings = config(train_files=write(folder / "a.parquet", 3, **columns), max_prompt_length=64)
    distillation = settings.distillation.model_copy(
        update={
            "enable": True,
            "teacher": settings.distillation.teacher.model_copy(
                update={"path": str(teacher), "use_own_chat_template": is_used}
            ),
        }
    )
    return read_data(settings.model_copy(update={"distillation": distillation}))


@pytest.mark.parametrize(
    ("template", "is_used", "columns", "hint"),
    [
        (
            "Q: {{ messages[0].content }}",
            False,
            {"prompt": CHAT},
            "set distillation.teacher.use_own_chat_template=true",
        ),
        ("Q: {{ messages[0].content }}", True, {"prompt": CHAT}, None),
        (CHAT_TEMPLATE, False, {"prompt": CHAT}, None),
        (CHAT_TEMPLATE, True, {"prompt": CHAT}, "both templates render the first prompt alike"),
        (None, False, {"prompt": CHAT}, None),
        ("Q: {{ messages[0].content }}", True, {}, "=true has no effect: prompts are strings"),
    ],
)
def test_a_hint_if_the_chat_template_of_a_teacher_should_be_set_otherwise(
    tmp_path: Path, config: Any, template: str | None, is_used: bool, columns: Any, hint: str | None
) -> None:
    data = read_with_teacher(tmp_path, config, template, is_used=is_used, **columns)
    hints = [report for report in data.reports if "use_own_chat_template" in report or "both templates" in report]
    assert len(hints) == (hint is not None)
    assert hint is None or hint in hints[0]
    assert data.datasets["train"].teacher == (str(tmp_path / "teacher") if is_used else None)


def test_a_teacher_without_a_chat_template_cannot_use_it(tmp_path: Path, config: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"requires a chat template, but .* has none; set .*use_own_chat_template=false"
    ):
        read_with_teacher(tmp_path, config, None, is_used=True, prompt=CHAT)
