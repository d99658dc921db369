"""Before a run starts, the reward function is loaded once, in another process than the controller."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import children

from verl.config.load import load
from verl.config.schema import Config
from verl.errors import RewardError
from verl.trainer.build.preflight import check_reward

pytestmark = [pytest.mark.contract, pytest.mark.timeout(60)]


def config(path: Path, *more: str) -> Config:
    overrides = ["actor_rollout_ref.rollout.n=8", f"reward.custom_reward_function.path={path}", *more]
    return load(overrides, complete=False)[0].config


async def test_the_file_is_imported_in_another_process_which_ends(tmp_path: Path) -> None:
    file, pid = tmp_path / "my_reward.py", tmp_path / "pid"
    file.write_text(
        f"import os\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    await check_reward(config(file, "reward.reward_manager.name=prime", "reward.num_workers=8"))
    assert int(pid.read_text()) != os.getpid()
    assert children() == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("import nowhere_to_be_found\n", "imports 'nowhere_to_be_found', which is not installed here"),
        ("import os\nos._exit(3)\n", "ended its process with exit code 3"),
        ("def compute_reward(data_source, solution_str, ground_truth):\n    return 1\n", "it has: compute_reward"),
    ],
)
async def test_a_file_that_cannot_be_used_is_reported_before_the_start(tmp_path: Path, body: str, says: str) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text(body)
    with pytest.raises(RewardError, match=says):
        await check_reward(config(file))
