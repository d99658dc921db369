"""The environment of TRL, which is compared with: its dependencies conflict with ours."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from _common import ROOT


def trl_home() -> Path:
    mark = hashlib.sha256((ROOT / "constraints.txt").read_bytes()).hexdigest()[:12]
    return Path("~/.cache/verl").expanduser() / f"trl-{mark}"


def find_trl() -> Path | None:
    """The Python of the environment with TRL, if it has been made."""
    return trl_home() / "bin" / "python" if (trl_home() / ".complete").exists() else None


def trl_python() -> Path:
    """The Python of an environment with TRL, made when it is first asked for."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    home = trl_home()
    python = home / "bin" / "python"
    if not (home / ".complete").exists():
        print(f"making an environment for TRL in {home}: some minutes, once", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *pins, "setuptools"], check=True)
        subprocess.run([*install, "--constraint", str(ROOT / "constraints.txt"), "trl"], check=True)
        (home / ".complete").touch()
    return python
