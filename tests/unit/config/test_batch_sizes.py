"""The sizes that follow from the batch settings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config.batch_sizes import (
    BatchSizes,
    count_data_ranks,
    count_engines,
    count_episode_workers,
    count_policy_steps,
    count_rank_multiple,
    count_total_steps,
    count_train_ranks,
    derive_sizes,
    get_actor_batch_sizes,
    get_critic_batch_sizes,
    get_max_sequence_tokens,
    render_sizes,
)
from verl.config.load import load, load_dict
from verl.config.schema import Config

pytestmark = pytest.mark.unit

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GAE = "algorithm.adv_estimator=gae"


def sizes(config: Config) -> dict[str, int]:
    return {size.name: size.value for size in derive_sizes(config)}


def test_the_sizes_of_the_grpo_example() -> None:
    overrides = ["data.train_batch_size=128", "data.max_response_length=1024", f"{R}.n=8", "trainer.n_gpus_per_node=4"]
    overrides += [f"{A}.ppo_mini_batch_size=64", f"{A}.ppo_micro_batch_size_per_gpu=2"]
    [loaded] = load([*overrides, "trainer.total_epochs=20"], complete=False)
    assert count_total_steps(loaded.config, prompts=7473) == 1167
    assert sizes(loaded.config) == {
        "prompts per step": 128,
        "responses per step": 1024,
        "maximum tokens per sequence": 1536,
        "engines": 4,
        "responses generated at once": 1024,
        "train ranks": 4,
        "optimizer steps per step": 2,
        "samples per mini-batch": 512,
        "... per rank": 128,
        "samples per micro-batch": 2,
        "... maximum tokens": 3072,
        "micro-batches per mini-batch": 64,
    }


def test_sequences_at_once_are_explained_where_vllm_chooses_them() -> None:
    def row(*overrides: str) -> tuple[int, str]:
        [loaded] = load([f"{R}.n=8", "trainer.n_gpus_per_node=2", *overrides], complete=False)
        [size] = [size for size in derive_sizes(loaded.config) if size.name == "responses generated at once"]
        return size.value, size.how

    assert row("trainer.device=cpu") == (512, "engines x 256 (rollout.max_num_seqs=null)")
    assert row() == (512, "engines x 256, or more on accelerators (rollout.max_num_seqs=null)")
    assert row(f"{R}.max_num_seqs=64") == (128, "engines x rollout.max_num_seqs")
    load([f"{R}.n=8", f"{R}.max_num_batched_tokens=100"], complete=False)  # fewer sequences, without being asked


def test_a_token_budget_replaces_the_samples_of_a_micro_batch() -> None:
    [loaded] = load([f"{R}.n=8", f"{A}.use_dynamic_bsz=true"], complete=False)
    found = sizes(loaded.config)
    assert found["tokens per micro-batch"] == 16384
    assert "samples per micro-batch" not in found


def test_ranks_that_share_sequences_have_the_same_samples_and_a_budget_together() -> None:
    overrides = [f"{R}.n=8", f"{A}.use_dynamic_bsz=true", f"{A}.ulysses_sequence_parallel_size=4"]
    [loaded] = load([*overrides, "data.train_batch_size=64", f"{A}.ppo_mini_batch_size=64"], complete=False)
    rows = {size.name: (size.value, size.how) for size in derive_sizes(loaded.config)}
    assert (count_train_ranks(loaded.config), count_data_ranks(loaded.config)) == (8, 2)
    assert rows["... per rank"] == (256, "512 / 2 groups of 4 ranks, rounded up")
    how = "actor.ppo_max_token_len_per_gpu x ulysses_sequence_parallel_size=4"
    assert rows["tokens per micro-batch"] == (4 * 16384, how)
    assert get_critic_batch_sizes(loaded.config).micro_batch_tokens == 4 * 16384
    assert count_rank_multiple(loaded.config) == 4


def test_the_sizes_of_the_ppo_example_have_those_of_the_critic() -> None:
    overrides = [GAE, "data.train_batch_size=256", "trainer.n_gpus_per_node=4", f"{A}.ppo_mini_batch_size=64"]
    overrides += ["critic.ppo_micro_batch_size_per_gpu=4", "critic.ppo_epochs=2"]
    [loaded] = load(overrides, complete=False)
    rows = [(size.name, size.value, size.how) for size in derive_sizes(loaded.config)]
    start = next(i for i, (name, *_) in enumerate(rows) if "critic" in name)
    assert rows[start:] == [
        ("critic optimizer steps per step", 8, "ceil(256 / ppo_mini_batch_size=64) x ppo_epochs=2"),
        ("samples per critic mini-batch", 64, "64 prompts x rollout.n=1"),
        ("... per rank", 16, "64 / 4 ranks, rounded up"),
        ("samples per critic micro-batch", 4, "critic.ppo_micro_batch_size_per_gpu"),
        ("... maximum tokens", 4096, "4 samples x 1024 tokens"),
        ("micro-batches per critic mini-batch", 4, "16 samples / 4"),
    ]


def test_batch_sizes_of_the_critic_default_to_those_of_the_actor() -> None:
    actor = [f"{A}.ppo_mini_batch_size=32", f"{A}.ppo_epochs=3", f"{A}.use_dynamic_bsz=true"]
    [loaded] = load([GAE, *actor, f"{A}.ppo_max_token_len_per_gpu=5000"], complete=False)
    assert (
        get_critic_batch_sizes(loaded.config) == get_actor_batch_sizes(loaded.config) == BatchSizes(32, None, 5000, 3)
    )
    own = ["critic.ppo_mini_batch_size=8", "critic.ppo_epochs=1", "critic.use_dynamic_bsz=false"]
    [loaded] = load([GAE, *actor, *own], complete=False)
    assert get_critic_batch_sizes(loaded.config) == BatchSizes(8, 8, None, 1)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        (["trainer.device=cuda"], (16384, 16384)),
        (["trainer.device=cpu"], (None, None)),
        ([], (None, None)),  # the start of the run knows the device
        (["trainer.device=cuda", f"{A}.use_dynamic_bsz=false"], (None, None)),
        (["trainer.device=cuda", f"{A}.ppo_max_token_len_per_gpu=5000"], (5000, 5000)),
        (["trainer.device=cuda", f"{A}.ppo_micro_batch_size_per_gpu=8"], (None, None)),
        (["trainer.device=cuda", "critic.ppo_micro_batch_size_per_gpu=2"], (None, None)),
        (["trainer.device=cuda", f"{R}.log_prob_micro_batch_size_per_gpu=2"], (None, None)),
        (["trainer.device=cuda", f"{R}.log_prob_micro_batch_size_per_gpu=null"], (16384, 16384)),
        (["trainer.device=cuda", f"{A}.ppo_micro_batch_size_per_gpu=8", f"{A}.use_dynamic_bsz=true"], (16384, 16384)),
        (["trainer.device=cuda", f"{A}.ppo_micro_batch_size_per_gpu=8", f"{A}.use_dynamic_bsz=null"], (16384, 16384)),
        (["trainer.device=cuda", "critic.use_dynamic_bsz=false"], (16384, None)),
        (["trainer.device=cpu", "critic.use_dynamic_bsz=true"], (None, 16384)),
    ],
)
def test_tokens_limit_micro_batches_on_accelerators_unless_a_size_in_samples_is_given(
    settings: list[str], tokens: tuple[int | None, int | None]
) -> None:
    config = load([GAE, *settings], complete=False)[0].config
    sizes = (get_actor_batch_sizes(config), get_critic_batch_sizes(config))
    assert tuple(each.micro_batch_tokens for each in sizes) == tokens
    assert [each.micro_batch_samples is None for each in sizes] == [each is not None for each in tokens]


def test_settings_that_are_listed_completely_leave_the_limit_open() -> None:
    everything = load([], complete=False)[0].config.model_dump(mode="json")
    config = load_dict(everything, ["trainer.device=cuda"], complete=False).config
    assert get_actor_batch_sizes(config).micro_batch_tokens == 16384


def test_a_limit_by_samples_that_another_setting_implies_has_it_as_its_origin() -> None:
    [loaded] = load([f"{A}.ppo_micro_batch_size_per_gpu=8"], complete=False)
    assert loaded.origins[f"{A}.use_dynamic_bsz"] == f"{A}.ppo_micro_batch_size_per_gpu is given"
    again = load_dict(loaded.config.model_dump(mode="json"), ["trainer.device=cuda"], complete=False).config
    assert get_actor_batch_sizes(again).micro_batch_samples == 8


def test_the_sizes_of_a_step_say_that_the_device_decides() -> None:
    def explain(*settings: str) -> list[str]:
        rows = derive_sizes(load([GAE, *settings], complete=False)[0].config)
        return [size.how.rpartition(".")[2] for size in rows if "micro-batch" in size.name and "per_gpu" in size.how]

    own = ("critic.use_dynamic_bsz=false",)
    samples, open_samples = (
        "ppo_micro_batch_size_per_gpu",
        "ppo_micro_batch_size_per_gpu, or ppo_max_token_len_per_gpu on accelerators",
    )
    assert explain() == [open_samples, open_samples]
    assert explain(*own) == [open_samples, samples]
    assert explain("trainer.device=cpu") == [samples, samples]
    assert explain("trainer.device=cuda") == ["ppo_max_token_len_per_gpu"] * 2


def test_a_size_that_the_device_makes_useless_is_reported() -> None:
    def reported(*settings: str) -> list[str]:
        hints = load([GAE, f"{R}.n=8", *settings], complete=False)[0].hints
        return [hint.partition("=")[0] for hint in hints if "has no effect" in hint]

    for key in (f"{A}.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"):
        assert reported(f"{key}=9000") == reported(f"{key}=9000", "trainer.device=cuda") == []
        assert reported(f"{key}=9000", "trainer.device=cpu") == [key]
    key = "critic.ppo_micro_batch_size_per_gpu"
    assert reported(f"{key}=2", "trainer.device=cuda") == []
    assert reported(f"{key}=2", "trainer.device=cuda", f"{A}.use_dynamic_bsz=true") == [key]
    assert reported(f"{key}=2", "trainer.device=cuda", f"{A}.use_dynamic_bsz=null") == [key]


def test_the_critics_warm_up_takes_steps_from_the_policy_if_there_is_a_critic() -> None:
    config = load([GAE, "trainer.critic_warmup=3"], complete=False)[0].config
    assert [count_policy_steps(config, steps) for steps in (2, 3, 10)] == [0, 0, 7]
    assert count_policy_steps(load(["trainer.critic_warmup=3"], complete=False)[0].config, 10) == 10


def test_the_table_of_sizes_names_the_unit_of_the_warm_up() -> None:
    config = load([GAE, f"{A}.optim.lr_warmup_steps=10", "critic.optim.lr_warmup_steps=5"], complete=False)[0].config
    rows = {size.name: (size.value, size.how) for size in derive_sizes(config)}
    assert rows["learning rate warm-up steps"] == (10, "actor.optim.lr_warmup_steps, in training steps")
    assert rows["critic learning rate warm-up steps"][0] == 5


small = st.integers(1, 40)


@settings(deadline=None)
@given(batch=small, n=small, mini=small, micro=small, ranks=small, tp=small, epochs=small)
def test_sizes_cover_all_samples_without_an_empty_micro_batch(
    batch: int, n: int, mini: int, micro: int, ranks: int, tp: int, epochs: int
) -> None:
    config = Config.model_validate(
        {
            "data": {"train_batch_size": batch},
            "trainer": {"n_gpus_per_node": ranks},
            "actor_rollout_ref": {
                "actor": {"ppo_mini_batch_size": mini, "ppo_micro_batch_size_per_gpu": micro, "ppo_epochs": epochs},
                "rollout": {"n": n, "tensor_model_parallel_size": tp},
            },
        }
    )
    found = sizes(config)
    mini_batches, rest = divmod(found["optimizer steps per step"], epochs)
    assert rest == 0
    assert (mini_batches - 1) * found["samples per mini-batch"] < batch * n
    assert mini_batches * found["samples per mini-batch"] >= batch * n
    assert found["... per rank"] * ranks >= found["samples per mini-batch"]
    pieces, size = found["micro-batches per mini-batch"], found["samples per micro-batch"]
    assert (pieces - 1) * size < found["... per rank"] <= pieces * size
    assert found["engines"] == count_engines(config) >= 1
    assert count_train_ranks(config) == ranks
    assert get_max_sequence_tokens(config) == 1024
    assert count_total_steps(config, prompts=batch * 3) == 3


def test_the_table_is_aligned() -> None:
    rows = derive_sizes(Config())
    lines = render_sizes(Config()).splitlines()
    assert len(lines) == len(rows)
    assert len({line.index(row.how, len(row.name)) for line, row in zip(lines, rows, strict=True)}) == 1


@pytest.mark.parametrize(
    ("cores", "settings", "expected"),
    [
        (2, [], 1),
        (96, [], 6),  # 8,192 episodes, and 16 cores for each worker
        (256, [], 8),
        (96, ["trainer.nnodes=2"], 8),
        (96, [f"{R}.n=2"], 2),
        (96, [f"{R}.n=2", "trainer.max_staleness=1"], 4),
        (2, ["trainer.nnodes=4"], 4),
        (256, ["trainer.deterministic=true"], 1),
        (256, ["trainer.local=true", "trainer.n_gpus_per_node=1"], 1),
    ],
)
def test_episode_workers_follow_episodes_and_cores(cores: int, settings: list[str], expected: int) -> None:
    sizes = ["data.train_batch_size=1024", f"{R}.n=8", "trainer.n_gpus_per_node=8"]
    [loaded] = load([*sizes, *settings], complete=False)
    assert count_episode_workers(loaded.config, cores) == expected
