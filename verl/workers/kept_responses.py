"""Responses that a run keeps for the next one: `skip.rollout` trains on them without generating any."""

from __future__ import annotations

import os
from pathlib import Path

from verl.config.schema import Config
from verl.private_files import make_folder
from verl.types import Prompt, Sample


class KeptResponses:
    """The samples of training prompts in files: one per prompt, in a folder for each size of the batches.

    Args:
        folder: Where the files are.
        batch: The prompts of a step.
        steps: The steps whose responses are kept and reused; none: all.
    """

    def __init__(self, folder: Path, batch: int, steps: frozenset[int] = frozenset()) -> None:
        self._folder, self._batch, self._steps = folder, batch, steps

    @classmethod
    def from_config(cls, config: Config) -> KeptResponses | None:
        skip, trainer, data = config.skip.rollout, config.trainer, config.data
        if not skip.enable:
            return None
        n, batch = config.actor_rollout_ref.rollout.n, data.train_batch_size
        name = f"batch{batch}_n{n}_prompt{data.max_prompt_length}_response{data.max_response_length}"
        folder = Path(skip.dump_dir).expanduser() / trainer.project_name / trainer.experiment_name / name
        return cls(folder, batch, frozenset(skip.steps))

    def read(self, group: int, prompt: Prompt) -> list[Sample] | None:
        """Return the samples of the prompt at this position of the data; None without them, or of another prompt."""
        import torch

        from verl.training.policy.recorded_step import unpack_samples

        if not self._is_kept(group) or not (path := self._get_path(group)).exists():
            return None
        kept = torch.load(path, weights_only=True)
        return unpack_samples(kept) if kept["prompt"] == prompt.token_ids else None

    def write(self, group: int, prompt: Prompt, samples: list[Sample]) -> None:
        """Keep the samples of a prompt, unless some could not be scored."""
        import torch

        from verl.training.policy.recorded_step import pack_samples

        if not self._is_kept(group) or any(sample.failure is not None for sample in samples):
            return
        path = self._get_path(group)
        make_folder(path.parent)
        temporary = path.with_suffix(".tmp")
        torch.save({"prompt": prompt.token_ids, **pack_samples(samples)}, temporary)
        os.replace(temporary, path)

    def _is_kept(self, group: int) -> bool:
        return not self._steps or group // self._batch + 1 in self._steps

    def _get_path(self, group: int) -> Path:
        return self._folder / f"{group:08d}.pt"
