"""Whether a model has diverged is found out while engines sleep: the pass needs memory that they have when awake."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from verl.errors import DivergenceError
from verl.workers.train_base import BaseTrainWorker

pytestmark = pytest.mark.unit


class Engine:
    def __init__(self, problem: str = "") -> None:
        self.problem, self.passes = problem, 0

    def find_divergence(self) -> str:
        self.passes += 1
        return self.problem


def worker_of(**engines: Engine) -> tuple[BaseTrainWorker, list[str]]:
    worker, written = BaseTrainWorker(0, 1), list[str]()
    models: Any = SimpleNamespace(engines=lambda: engines, states=lambda contents: {})
    settings: Any = SimpleNamespace(save_contents=None, save_hf=False)
    writer: Any = SimpleNamespace(start=lambda states, directory, *rest: written.append(str(directory)))
    worker._trained, worker._settings, worker._writer = models, settings, writer
    return worker, written


def test_a_save_after_a_check_makes_no_pass() -> None:
    worker, written = worker_of(actor=(actor := Engine()), critic=(critic := Engine()))
    worker.check()
    worker.save("folder", {})
    assert (actor.passes, critic.passes, written) == (1, 1, ["folder"])


def test_a_save_without_a_check_makes_its_own() -> None:
    worker, written = worker_of(actor=(actor := Engine()))
    worker.save("folder", {})
    assert (actor.passes, written) == (1, ["folder"])


def test_what_the_check_found_is_raised_by_the_save() -> None:
    worker, written = worker_of(actor=Engine(), critic=Engine("weights are not finite: head"))
    worker.check()
    with pytest.raises(DivergenceError, match=r"critic: training has diverged: weights are not finite: head\. Nothing"):
        worker.save("folder", {})
    assert not written
