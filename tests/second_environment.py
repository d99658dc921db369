"""A second Python environment, cheaply: its interpreter has a prefix of its own and the packages of this one."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def make_environment(folder: Path) -> str:
    """Create a virtual environment in `folder`; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    shared = sysconfig.get_path("purelib")
    packages.joinpath("shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    return str(folder / "bin" / "python")
