"""An environment with the library verifiers, whose dependencies are not those of verl.

python tests/verifiers_environment.py

makes it under ~/.cache/verl, in some minutes, once.
"""

import subprocess
import sys
from pathlib import Path

VERSION = "0.4.0"
HOME = Path("~/.cache/verl").expanduser() / f"verifiers-{VERSION}"
PYTHON = HOME / "bin" / "python"


def find_verifiers() -> Path | None:
    """Return the Python of the environment, if it has been made."""
    return PYTHON if (HOME / ".complete").exists() else None


def make_environment() -> None:
    if find_verifiers() is None:
        subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
        subprocess.run([str(PYTHON), "-m", "pip", "install", "--quiet", f"verifiers=={VERSION}", "uv"], check=True)
        (HOME / ".complete").touch()


if __name__ == "__main__":
    make_environment()
