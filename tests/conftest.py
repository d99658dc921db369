"""What all tests share: settings of hypothesis, and the rotation of tests that do not run at every commit."""

import os

import pytest
from hypothesis import settings
from rotation import GROUPS, current_group, record_left

# Timings say nothing on a machine that others use too. New examples are for desks: CI says the same twice.
settings.register_profile("shared-machine", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("shared-machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "all tests (the default), or those that CI runs at this commit"
    parser.addoption("--rotation", choices=["all", "due"], default="all", help=text)


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is left to other commits; a test runs with the group of its closest mark."""
    groups = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("rotating"))}
    if wrong := [f"{item.nodeid} ({group})" for item, group in groups.items() if group not in range(GROUPS)]:
        raise pytest.UsageError(f"the groups of the rotation are 0 to {GROUPS - 1}: {', '.join(wrong)}")
    if config.getoption("rotation") == "all":
        return
    due = current_group()
    left = [item for item, group in groups.items() if group != due]
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=left)
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":  # all workers collect the same
        record_left(item.nodeid.removeprefix("tests/") for item in left)
