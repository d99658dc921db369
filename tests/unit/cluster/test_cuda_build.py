"""Builds of torch that cannot use the accelerators of a machine are refused, with the fix."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.cluster import cuda_build
from verl.cluster.cuda_build import describe_problem, find_torch_problem
from verl.errors import ConfigError
from verl.preflight import machine
from verl.workers.train_base import BaseTrainWorker, RankGroup

pytestmark = pytest.mark.unit


def test_the_cpu_build_is_refused_whatever_the_driver() -> None:
    problem = describe_problem("2.13.0+cpu", None, ["580.65.06"])
    assert problem.startswith("torch: 2.13.0+cpu is a build without CUDA; run pip install")


@pytest.mark.parametrize(
    ("cuda", "driver", "is_old"),
    [
        ((13, 0), "579.99", True),
        ((13, 0), "580.65.06", False),
        ((13, 2), "590.10", False),
        ((12, 9), "580.65.06", False),
        ((12, 6), "470.82.01", True),
        ((13, 0), "[Unknown Error]", False),
    ],
)
def test_a_driver_must_be_as_new_as_the_cuda_of_the_build(cuda: tuple[int, int], driver: str, is_old: bool) -> None:
    problem = describe_problem("2.13.0", cuda, ["590.1", driver])
    assert bool(problem) == is_old
    if is_old:
        assert driver in problem
        assert "or later" in problem


def test_the_installed_torch_is_read_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_build, "query_gpus", lambda *fields: ["580.65.06"])
    assert "+cpu is a build without CUDA" in find_torch_problem()


def test_a_torch_whose_build_cannot_be_read_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_build, "distribution", lambda name: SimpleNamespace(read_text=lambda file: None))
    assert find_torch_problem() == ""


def test_an_old_driver_with_which_torch_works_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BaseTrainWorker(0, 1).find_device_problem()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert BaseTrainWorker(0, 1).find_device_problem() == ""


def test_the_doctor_names_the_fix_on_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_build, "query_gpus", lambda *fields: ["535.10"])
    (finding,) = (each for each in machine.find_machine_findings(8) if each.place == "torch")
    assert finding.fix.startswith("run pip install")
    assert not [each for each in machine.find_machine_findings(0) if each.place == "torch"]


async def test_a_run_ends_before_its_engines_start_if_a_rank_cannot_use_its_device() -> None:
    class Ranks(RankGroup):
        worker = BaseTrainWorker

        async def call(self, method: str, *args: Any, **options: Any) -> list[str]:
            return [BaseTrainWorker(0, 2).find_device_problem(), BaseTrainWorker(1, 2).find_device_problem()]

    with pytest.raises(ConfigError) as raised:
        await Ranks([None, None]).check_devices()
    (problem,) = raised.value.problems
    assert "is a build without CUDA" in problem
