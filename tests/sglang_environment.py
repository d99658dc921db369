"""An environment in which SGLang runs on the CPU, with stand-ins for what PyPI has for CUDA only.

SGLang pins other versions than verl; of its dependencies only those are added that it imports here. The packages are
kept under ~/.cache/verl. An environment adds them to those of this one, and takes a second to make.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.second_environment import make_environment

STAND_INS = Path(__file__).parent / "sglang_cpu"


def make_sglang_environment(folder: Path) -> str:
    """Create an environment in `folder`; return its interpreter. Skips the test if SGLang cannot be installed."""
    packages = find_packages()
    if isinstance(packages, str):
        pytest.skip(f"SGLang cannot be installed here: {packages}")
    return make_environment(folder, packages)


@cache
def find_packages() -> Path | str:
    """Return the folder of SGLang and the stand-ins, which is made if it is missing, or why it cannot be made."""
    files = sorted(file for file in STAND_INS.rglob("*") if file.suffix in (".py", ".txt"))
    mark = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    home = Path("~/.cache/verl").expanduser() / f"sglang-{mark}"
    if home.exists():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=home.parent, prefix="sglang-new-"))
    pins = STAND_INS / "requirements.txt"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--requirement",
        pins,
    ]
    done = subprocess.run([*command, "--target", str(made)], capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(made)
        return done.stderr.strip().splitlines()[-1]
    shutil.copytree(STAND_INS, made, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    write_plugin(made)
    try:
        os.rename(made, home)
    except OSError:  # another process was faster
        shutil.rmtree(made)
    return home


def write_plugin(packages: Path) -> None:
    """Register `batched_decode` as a plugin of SGLang: an entry point of an installed package."""
    info = packages / "batched_decode-1.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: batched-decode\nVersion: 1\n")
    info.joinpath("entry_points.txt").write_text("[sglang.srt.plugins]\nbatched_decode = batched_decode:register\n")
