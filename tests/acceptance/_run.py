"""Run an acceptance script by its name, as `make show-NAME ARGS=...` does.

python tests/acceptance/_run.py NAME [argument ...]

The scripts are in one folder per group; they find helpers in their own folder, in this one and in `tests/`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def scripts() -> dict[str, Path]:
    """Return all scripts by name, in the order of names."""
    return dict(sorted((path.stem, path) for path in FOLDER.glob("*/[a-z]*.py")))


def environment() -> dict[str, str]:
    """Return the environment variables of a script."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parent), *given])}


def main() -> None:
    name, *arguments = sys.argv[1:]
    path = scripts().get(name.replace("-", "_"))
    if path is None:
        known = ", ".join(each.replace("_", "-") for each in scripts())
        raise SystemExit(f"there is no acceptance script show-{name}; there are: {known}")
    os.execve(sys.executable, [sys.executable, str(path), *arguments], environment())


if __name__ == "__main__":
    main()
