"""The Python trainers: arguments become settings and files; the public names are pinned."""

import importlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tiny import chat_tokenizer, tiny_qwen2
from torch.utils.data import DataLoader

import verl
from verl.checkpoint.manifest import CheckpointDir
from verl.config.load import LoadedConfig
from verl.data import prompts as module
from verl.data.prompts import iter_rows, write_rows
from verl.errors import CheckpointError, ConfigError, DataError, EngineError
from verl.trainer.api import GRPOTrainer, PPOTrainer, TrainingConfig, _read_result, _run_to_end
from verl.trainer.train_loop import LoopSchedule
from verl.workers import RolloutWorker, TrainerWorker

pytestmark = pytest.mark.unit

OFFERED = {
    "verl": {"GRPOTrainer", "PPOTrainer", "TrainResult", "Training", "TrainingConfig", "__version__", "tool"},
    "verl.trainer": {"TrainingConfig"},
    "verl.workers": {"Rollout", "RolloutWorker", "TrainerWorker"},
}


@pytest.mark.parametrize("module", OFFERED)
def test_the_public_names_are_pinned_and_importable(module: str) -> None:
    found = importlib.import_module(module)
    assert set(found.__all__) == OFFERED[module]
    for name in found.__all__:
        assert getattr(found, name).__doc__
    with pytest.raises(AttributeError, match="no_such_thing"):
        found.no_such_thing  # noqa: B018


def loaded(trainer: GRPOTrainer | PPOTrainer) -> LoadedConfig:
    trainer.folder.mkdir(exist_ok=True)
    return trainer._load(trainer.prompts, trainer.folder)


def test_a_config_becomes_settings(tmp_path: Path) -> None:
    config = TrainingConfig(
        total_epochs=3, batch_size=8, learning_rate=1e-5, ppo_epochs=4, clip_range=0.1, kl_coef=0.1, devices=2
    )
    grpo = loaded(GRPOTrainer("some/model", config=config, prompts=["a"], folder=tmp_path / "run")).config
    assert (grpo.algorithm.adv_estimator, grpo.actor_rollout_ref.rollout.n) == ("grpo", 8)
    assert (grpo.data.train_batch_size, grpo.trainer.total_epochs, grpo.trainer.n_gpus_per_node) == (8, 3, 2)
    actor = grpo.actor_rollout_ref.actor
    assert (actor.optim.lr, actor.ppo_epochs, actor.clip_ratio, actor.ppo_mini_batch_size) == (1e-5, 4, 0.1, 8)
    assert (actor.use_kl_loss, actor.kl_loss_coef) == (True, 0.1)
    ppo = loaded(PPOTrainer("some/model", config=config, prompts=["a"], folder=tmp_path / "run")).config
    assert (ppo.algorithm.adv_estimator, ppo.actor_rollout_ref.rollout.n) == ("gae", 1)
    assert (ppo.algorithm.use_kl_in_reward, ppo.algorithm.kl_ctrl.kl_coef) == (True, 0.1)


def test_a_config_is_saved_as_a_dict() -> None:
    assert TrainingConfig(**TrainingConfig(batch_size=3).__dict__) == TrainingConfig(batch_size=3)


def test_settings_override_the_config_and_unknown_ones_are_named(tmp_path: Path) -> None:
    def made(**settings: Any) -> GRPOTrainer:
        config = TrainingConfig(settings={key.replace("__", "."): value for key, value in settings.items()})
        return GRPOTrainer("some/model", config=config, prompts=["a"], folder=tmp_path / "run")

    assert loaded(made(algorithm__adv_estimator="rloo")).config.algorithm.adv_estimator == "rloo"
    with pytest.raises(
        ConfigError, match=r"(?s)trainer\.sede: is not a setting.*algorithm\.adv_estimator: rlo must be"
    ):
        loaded(made(algorithm__adv_estimator="rlo", trainer__sede=3))


def test_validation_looks_at_the_model_before_and_after_training(tmp_path: Path) -> None:
    def validated(**more: Any) -> list[int]:
        trainer = loaded(GRPOTrainer("some/model", prompts=["a"], folder=tmp_path / "run", **more)).config.trainer
        table = LoopSchedule(1, 30, validate_every=trainer.test_freq)
        return [step for step in range(1, 31) if table.validates_at(step)]

    assert validated(validation=["b"]) == [30]
    assert validated(validation=["b"], config=TrainingConfig(settings={"trainer.test_freq": 20})) == [20, 30]
    assert validated() == []


def test_a_run_in_one_process_takes_transformers(tmp_path: Path) -> None:
    config = loaded(GRPOTrainer("some/model", prompts=["a"], local=True, folder=tmp_path / "run")).config
    assert (config.trainer.local, config.actor_rollout_ref.rollout.name) == (True, "hf")


def test_a_function_is_named_and_a_file_is_a_path(tmp_path: Path) -> None:
    def short(response: str) -> float:
        return -len(response)

    given = loaded(GRPOTrainer("some/model", prompts=["a"], reward=short, folder=tmp_path / "run")).config
    assert given.reward.custom_reward_function.name == "short"
    filed = loaded(GRPOTrainer("some/model", prompts=["a"], reward="mine.py", folder=tmp_path / "run")).config
    assert filed.reward.custom_reward_function.path == "mine.py"


def test_a_model_object_uses_the_tokenizer_of_its_path_or_is_refused(tmp_path: Path) -> None:
    def made(model: Any, tokenizer: Any = None) -> str | None:
        trainer = GRPOTrainer(model, tokenizer, prompts=["a"], folder=tmp_path / "run")
        return loaded(trainer).config.actor_rollout_ref.model.tokenizer_path

    fresh = transformers.AutoModelForCausalLM.from_config(tiny_qwen2(vocab_size=127))
    with pytest.raises(ConfigError, match=r"tokenizer: must be given, since the model was not loaded from a path"):
        made(fresh)
    fresh.save_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"tokenizer: must be given, since there is none at .*model'"):
        made(model)
    empty = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"tokenizer: Qwen2Tokenizer of .* has no vocabulary"):
        made(model, empty)
    written = made(model, chat_tokenizer())
    assert len(transformers.AutoTokenizer.from_pretrained(written)) >= 127
    chat_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").unlink()
    assert made(model) == written
    assert len(transformers.AutoTokenizer.from_pretrained(written)) >= 127
    assert made("some/model") is None


@pytest.mark.parametrize("maker", [GRPOTrainer, RolloutWorker, TrainerWorker])
def test_wrapped_models_are_refused_with_a_fix(tmp_path: Path, maker: Any) -> None:
    def trainer(model: Any) -> None:
        loaded(GRPOTrainer(model, chat_tokenizer(), prompts=["a"], folder=tmp_path / "run"))

    make = trainer if maker is GRPOTrainer else maker

    def refused(model: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            make(model)
        return str(caught.value)

    plain = transformers.AutoModelForCausalLM.from_config(tiny_qwen2(vocab_size=127))
    assert "must be a transformers PreTrainedModel" in refused(torch.nn.DataParallel(plain))
    assert "model: PeftModelForCausalLM has a PEFT adapter" in refused(
        get_peft_model(plain, LoraConfig(r=2, task_type="CAUSAL_LM"))
    )


def test_missing_prompts_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prompts: must be given"):
        GRPOTrainer("some/model", folder=tmp_path).train()
    with pytest.raises(DataError, match="was already consumed"):
        write_rows(iter(()), tmp_path / "rows.jsonl")


CHAT = [{"role": "user", "content": "Hi"}]


def test_texts_chats_and_rows_become_rows() -> None:
    assert list(iter_rows(["a", CHAT, {"prompt": CHAT, "answer": "b"}])) == [
        {"prompt": "a"},
        {"prompt": CHAT},
        {"prompt": CHAT, "answer": "b"},
    ]


ROWS = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]


def test_tables_and_dicts_of_columns_give_their_rows_and_never_the_names_of_their_columns() -> None:
    columns = {"prompt": ["a", "b"], "answer": [1, 2]}
    assert list(iter_rows(columns)) == list(iter_rows(pa.table(columns))) == list(iter_rows(Frame(columns))) == ROWS
    for splits in ({"train": ROWS, "test": ROWS}, {"train": pa.table(columns), "test": pa.table(columns)}):
        with pytest.raises(DataError, match=r"is a dict with train, test but no .prompt.*prompts\['train'\]"):
            list(iter_rows(splits))
    with pytest.raises(DataError, match=r"prompts\[0\] is a dict with question; .*rows with a \"prompt\""):
        list(iter_rows(pa.table({"question": ["a"]})))


class Frame:
    """As pandas has it: an iterable of the names of its columns."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns, self._held = list(columns), columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def to_dict(self, orient: str = "dict") -> Any:
        assert orient == "records"
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*self._held.values(), strict=True)]


def test_one_prompt_is_one_prompt_however_it_is_given() -> None:
    assert list(iter_rows("Hello")) == [{"prompt": "Hello"}]
    assert list(iter_rows(CHAT)) == [{"prompt": CHAT}]
    assert list(iter_rows({"prompt": "Hello", "answer": "b"})) == [{"prompt": "Hello", "answer": "b"}]


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([{"prompt": []}], r'prompts\[0\]: its "prompt" is an empty list'),
        ([{"prompt": [1, 2, 3]}], r'prompts\[0\]: its "prompt" is a list with a int'),
        ({"prompt": ["a", None]}, r'its "prompt" is a list with a NoneType'),
        (["a", []], r"prompts\[1\] is a list; give texts"),
    ],
)
def test_a_batch_without_prompts_is_refused(prompts: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        list(iter_rows(prompts))


def test_batches_of_a_loader_become_rows() -> None:
    rows = [{"prompt": f"{n}", "reward_model": {"ground_truth": str(n)}, "level": n} for n in range(5)]
    found = list(iter_rows(DataLoader(rows, batch_size=2)))
    assert [{**row, "level": int(row["level"])} for row in found] == rows
    assert list(iter_rows(DataLoader(["a", "b", "c"], batch_size=2))) == [{"prompt": one} for one in "abc"]
    assert list(iter_rows(DataLoader(rows, batch_size=2, collate_fn=list))) == rows


def test_collated_conversations_are_split_and_other_lists_refused() -> None:
    rows = [{"prompt": [*CHAT, {"role": "assistant", "content": f"{n}"}], "ground_truth": f"{n}"} for n in range(3)]
    assert list(iter_rows(DataLoader(rows, batch_size=2))) == rows
    listed = [{"prompt": f"{n}", "tests": ["a", "b"]} for n in range(2)]
    with pytest.raises(DataError, match=r"tests holds lists.*collate_fn=list"):
        list(iter_rows(DataLoader(listed, batch_size=2)))
    assert list(iter_rows(DataLoader(listed, batch_size=2, collate_fn=list))) == listed


def test_the_model_of_an_earlier_run_in_the_folder_is_not_returned(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "reward/mean": 1.0}\n')
    with pytest.raises(CheckpointError, match="ended after step 7, but the last checkpoint is of step None"):
        _read_result(tmp_path)
    config = TrainingConfig(settings={"trainer.save_freq": -1})
    unsaved = GRPOTrainer("some/model", prompts=["a"], config=config, folder=tmp_path / "run")
    with pytest.raises(ConfigError, match="the trained model is read from the last checkpoint"):
        loaded(unsaved)


def endless() -> Iterator[str]:
    while True:
        yield "a"


def test_an_endless_iterable_is_read_as_far_as_the_steps_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainingConfig(total_steps=3, batch_size=2)
    written = loaded(GRPOTrainer("some/model", prompts=endless(), config=config, folder=tmp_path / "run")).config
    assert Path(str(written.data.train_files)).read_text() == '{"prompt": "a"}\n' * 6
    whole = loaded(GRPOTrainer("some/model", prompts=["a"] * 9, config=config, folder=tmp_path / "run")).config
    assert Path(str(whole.data.train_files)).read_text() == '{"prompt": "a"}\n' * 9, "a list is drawn from as a whole"
    monkeypatch.setattr(module, "MANY", 3)
    with pytest.warns(UserWarning, match=r"3 rows are written to .*total_steps="):
        write_rows(iter("abcd"), tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"prompts\[1\] is a int"):
        write_rows(iter(["b", 3]), tmp_path / "rows.jsonl")
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 4, "as it was"


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_that_stopped_early_is_not_taken_for_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    async def ended(config: Any, *_: Any, **__: Any) -> int:
        if saved:
            checkpoints = CheckpointDir(config.trainer.checkpoint_dir)
            checkpoints.begin(4)
            checkpoints.commit(4, {})
        return 143

    monkeypatch.setattr("verl.trainer.api.train", ended)
    said = r"global_step_4; to resume:.*\n.*run.*resume_mode" if saved else "no checkpoint to resume from"
    with pytest.raises(EngineError, match=rf"exit code 143\).*{said}"):
        GRPOTrainer("some/model", prompts=["a"], folder=tmp_path / "run").train()


def test_a_second_run_gets_a_folder_of_its_own_unless_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Path] = []

    async def ended(config: Any, *_: Any, **__: Any) -> int:
        used.append(config.trainer.checkpoint_dir)
        checkpoints = CheckpointDir(config.trainer.checkpoint_dir)
        checkpoints.begin(1)
        checkpoints.commit(1, {})
        (config.trainer.checkpoint_dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1.0}\n')
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("verl.trainer.api.train", ended)
    for prompts in (["a"], ["b"], ["c"]):
        GRPOTrainer("some/model", prompts=prompts).train()
    resumed = TrainingConfig(settings={"trainer.resume_mode": "auto"})
    GRPOTrainer("some/model", prompts=["a"], folder="verl-run", config=resumed).train()
    other = TrainingConfig(
        settings={"trainer.resume_mode": "path", "trainer.resume_from_path": "verl-run-2/global_step_1"}
    )
    GRPOTrainer("some/model", prompts=["a"], folder="verl-run", config=other).train()
    GRPOTrainer("some/model", prompts=["b"], folder="verl-run-2", config=other).train()
    names = ["verl-run", "verl-run-2", "verl-run-3", "verl-run", "verl-run-4", "verl-run-2"]
    assert used == [Path(name) for name in names]
    assert Path("verl-run-2", "prompts.jsonl").read_text() == '{"prompt": "b"}\n'


def test_a_folder_that_cannot_be_made_is_a_mistake_in_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"folder=.*file/run: cannot be made"):
        GRPOTrainer("some/model", prompts=["a"], folder=tmp_path / "file" / "run").train()


def test_torch_numbers_are_written_and_an_invalid_prompt_is_named(tmp_path: Path) -> None:
    path = write_rows([{"prompt": "a", "level": torch.tensor(3)}], tmp_path / "rows.jsonl")
    assert Path(path).read_text() == '{"prompt": "a", "level": 3}\n'
    with pytest.raises(DataError, match=r"prompts\[1\] is a int"):
        list(iter_rows(["a", 3]))
    with pytest.raises(DataError, match=r"is a dict with question; .*rows with a \"prompt\""):
        list(iter_rows([{"question": "a"}]))
    with pytest.raises(DataError, match="convert it to text"):
        write_rows([{"prompt": "a", "what": object()}], tmp_path / "rows.jsonl")


def test_the_version_is_exported() -> None:
    assert verl.__version__


def test_an_error_of_a_run_is_raised_without_one_about_event_loops() -> None:
    async def fail() -> None:
        raise EngineError("the root cause")

    with pytest.raises(EngineError) as raised:
        _run_to_end(fail())
    assert raised.value.__context__ is None


def test_a_mistake_in_the_settings_is_a_message_after_the_line_of_the_user(tmp_path: Path) -> None:
    config = TrainingConfig(settings={"trainer.sed": 3})
    with pytest.raises(ConfigError, match=r"did you mean trainer\.seed") as raised:
        GRPOTrainer("some/model", prompts=["a"], folder=tmp_path / "run", config=config).train()
    assert len(traceback.extract_tb(raised.value.__traceback__)) == 2, "this test and train()"
    assert raised.value.__suppress_context__
