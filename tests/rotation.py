"""Which tests CI runs at a commit: most run at every one, rotating ones at one commit in `GROUPS`.

The number of commits chooses the group. Tests of pytest rotate by their mark, `rotating(group)`; short forms of
acceptance scripts by `ROTATION` in `tests/acceptance/_short.py`. Both write what they leave to other commits into the
file that `VERL_ROTATED_FILE` names, and `python tests/rotation.py FILE` prints it as one line, the last of `.ci/run`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

GROUPS = 6
_FILE = "VERL_ROTATED_FILE"


def current_group() -> int:
    """Return the group of this commit."""
    return count_commits() % GROUPS


def count_commits() -> int:
    """Return the number of commits; 0 outside a Git repository."""
    command = ["git", "rev-list", "--count", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else 0


def rotate_rest(group: int, cases: Sequence[Any], *, keep: int = 1) -> list[Any]:
    """Return cases for `parametrize` of which the first `keep` run at every commit, and the others with a group."""
    import pytest

    others = [case if isinstance(case, tuple) else (case,) for case in cases[keep:]]
    return [*cases[:keep], *(pytest.param(*case, marks=pytest.mark.rotating(group)) for case in others)]


def record_left(names: Iterable[str]) -> None:
    """Append the names of tests that this commit leaves to others to the file for them, if there is one."""
    if path := os.environ.get(_FILE):
        with open(path, "a") as file:
            file.writelines(f"{name}\n" for name in names)


def describe(names: Iterable[str]) -> str:
    """Return the names in one line; the cases of a parametrized test are counted."""
    counts = Counter(name.partition("[")[0] for name in names)
    parts = [name if count == 1 else f"{name} ({count} cases)" for name, count in sorted(counts.items())]
    return f"left to the rotation (group {current_group() + 1} of {GROUPS} ran): {', '.join(parts) or 'nothing'}"


if __name__ == "__main__":
    print(describe(Path(sys.argv[1]).read_text().splitlines()))
