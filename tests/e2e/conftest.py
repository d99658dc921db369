"""What runs of the whole program share: a tiny model with data, and that nothing of a run is left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import working_in

from verl.demo.assets import make_assets
from verl.demo.folder import Assets

PATIENCE_S = 60


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(autouse=True)
def _no_process_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test works in a folder of its own, and so do all processes of its runs: they are known by it.

    Runs have clusters of their own, whatever clusters other tests start on this machine meanwhile.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    yield
    deadline = time.monotonic() + PATIENCE_S
    while left := [process for process in working_in(tmp_path) if process.pid != os.getpid()]:
        assert time.monotonic() < deadline, f"left behind: {[process.info['cmdline'] for process in left]}"
        time.sleep(0.5)
