"""A second Python environment, cheaply: its interpreter has a prefix of its own and the packages of this one."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def make_environment(folder: Path, *first: Path) -> str:
    """Create a virtual environment in `folder`; return its interpreter. It finds the packages in `first` first."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    lines = [f"import site; site.addsitedir({str(each)!r})\n" for each in (*first, sysconfig.get_path("purelib"))]
    packages.joinpath("shared.pth").write_text("".join(lines))
    return str(folder / "bin" / "python")
