"""Digests of what a run is made from besides its model: data, and the code of rewards, tools and agents.

Checkpoints record them, so that a resume can name what has changed since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from verl.config.schema import Config, SftConfig
from verl.config.schema.conditions import ROLLOUT
from verl.data.files import STREAMED_BYTES, find_files
from verl.errors import DataError
from verl.trainer.build.code_files import list_files

DATA = "data.train_files"
_BLOCK = 1 << 20
_SAMPLED = 256  # blocks that are read of larger files than STREAMED_BYTES, and the first of each file

Sources = Mapping[str, str]
"""Setting -> digest of what it names."""


def digest_sources(config: Config | SftConfig) -> dict[str, str]:
    """Return digests by setting. What cannot be read here, such as a function in a notebook, has none."""
    try:
        files = find_files(config.data.train_files)
    except DataError:  # reported where the data is read
        files = []
    digests = {DATA: _digest_files(files)}
    if isinstance(config, Config):
        digests |= {setting: _digest_files(list_files(names)) for setting, names in _list_code(config).items()}
    return {setting: digest for setting, digest in digests.items() if digest}


def find_changes(saved: Sources, current: Sources) -> list[str]:
    """Return the settings whose data or code differ; those that only one of two runs recorded are not compared."""
    return [setting for setting, digest in current.items() if saved.get(setting, digest) != digest]


def _list_code(config: Config) -> dict[str, list[str]]:
    reward, rollout = config.reward, config.actor_rollout_ref.rollout
    turns = rollout.multi_turn
    code: dict[str, list[str | None]] = {
        "reward.custom_reward_function.path": [reward.custom_reward_function.path],
        "reward.functions": [function.get("path") for function in reward.functions],
        f"{ROLLOUT}.multi_turn.function_tool_path": [turns.function_tool_path],
        f"{ROLLOUT}.multi_turn.tool_config_path": [turns.tool_config_path],
        f"{ROLLOUT}.multi_turn.environment": [turns.environment],
        f"{ROLLOUT}.agent": [rollout.agent.default_agent_loop, *rollout.agent.agents.values()],
    }
    return {setting: [name for name in names if name] for setting, names in code.items()}


def _digest_files(files: Iterable[Path]) -> str:
    """Return a digest of the contents of files, in their order; "" without files."""
    files = list(files)
    total = sum(file.stat().st_size for file in files)
    step = _BLOCK if total <= STREAMED_BYTES else total // _SAMPLED
    digests = [_digest_file(file, step) for file in files]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest() if digests else ""


def _digest_file(path: Path, step: int) -> str:
    """Return the digest of the blocks that begin at multiples of `step`, and of the size."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()
