"""The CUDA side of verl on a machine without a GPU: packages, imports, names, engine settings, Triton kernels.

requirements-cuda.txt is installed into a virtual environment of its own, which is kept by the hash of that file below
VERL_CUDA_CACHE (default: ~/.cache/verl-cuda); it needs a download of several GB, and 14 GB of disk. A libcuda without
functions is built, with the symbols that the libraries of torch and vLLM look for. Then, as on a machine with 8 H100s:

- every pinned package has its version, and torch is a CUDA build
- every module of verl is imported, and what a run imports of vLLM's CUDA platform
- every name of torch.cuda and vLLM that verl uses exists
- vLLM accepts every engine setting, and does what it stands for
- Triton compiles the kernels that every request uses, for sm_80, sm_90 and sm_100

Nothing is computed. `--short` (CI) skips unless the environment is there already: it does not download.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import ROOT, finish, skip

REQUIREMENTS = ROOT / "requirements-cuda.txt"
MACHINE = Path(__file__).with_name("_cuda_machine")
CACHE = Path(os.environ.get("VERL_CUDA_CACHE", "~/.cache/verl-cuda")).expanduser()
DISK_GIB = 14
LIBRARIES = ("torch/lib", "vllm")
TIMEOUT_S = 3600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    if not (shutil.which("gcc") and shutil.which("nm") and shutil.which("readelf")):
        skip("cuda", "needs gcc and binutils, for a libcuda without functions")
    environment = CACHE / f"cuda-{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]}"
    if options.short and not (environment / ".complete").exists():
        skip("cuda", f"the environment of {REQUIREMENTS.name} is not there, and the short form downloads nothing")
    install(environment)
    with tempfile.TemporaryDirectory(prefix="verl-cuda-") as directory:
        symbols = build_libcuda(environment, Path(directory))
        scripts = {
            "packages": ["installed_packages.py", str(REQUIREMENTS)],
            "names": ["used_names.py", str(ROOT / "verl")],
            "imports": ["imported_modules.py"],
            "settings": ["accepted_settings.py"],
            "kernels": ["compiled_kernels.py"],
        }
        found = {name: run(environment, Path(directory), *script) for name, script in scripts.items()}
    problems = {
        name: problem
        for name, each in found.items()
        if (problem := each.get("missing") or each.get("problems") or each.get("uncovered"))
    }
    for name, problem in problems.items():
        print(f"{name}: {json.dumps(problem, indent=1)}")
    finish(
        "cuda",
        not problems and all(count for name, count in count_all(found).items() if name != "missing"),
        symbols=symbols,
        **count_all(found),
        missing=sum(map(len, problems.values())),
        without_extras=found["imports"]["without_extras"],
        snapshot=found["settings"]["found"],
    )


def count_all(found: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Return how much was looked at."""
    keys = {"packages": "packages", "names": "names", "imports": "imported", "settings": "cases", "kernels": "kernels"}
    return {name: found[name][key] for name, key in keys.items()}


def install(environment: Path) -> None:
    """Install the requirements, unless they are there."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{environment.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (environment / ".complete").exists():
            return
        if (free := shutil.disk_usage(CACHE).free / 2**30) < DISK_GIB:
            skip("cuda", f"{free:.0f} GiB of disk are free, {DISK_GIB} are needed")
        shutil.rmtree(environment, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        pip = [str(environment / "bin/pip"), "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
        subprocess.run([*pip, "--no-cache-dir", "-r", str(REQUIREMENTS)], check=True, timeout=TIMEOUT_S)
        (environment / ".complete").touch()


def build_libcuda(environment: Path, folder: Path) -> int:
    """Build a libcuda.so.1 whose functions return an error; return how many symbols it has."""
    [packages] = environment.glob("lib/python3*/site-packages")
    symbols: set[str] = set()
    for library in (path for name in LIBRARIES for path in (packages / name).rglob("*.so")):
        if "libcuda.so" in print_of("readelf", "--dynamic", str(library)):
            undefined = print_of("nm", "--dynamic", "--undefined-only", str(library))
            symbols |= set(re.findall(r"\b(cu[A-Z]\w+)", undefined))
    source = folder / "libcuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(symbols)))  # no device
    command = ["gcc", "-shared", "-fPIC", "-fno-builtin", str(source), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True)
    return len(symbols)


def print_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def run(environment: Path, libraries: Path, script: str, *arguments: str) -> dict[str, Any]:
    """Run a script of `_cuda_machine` in the environment; return the JSON that it prints last."""
    command = [str(environment / "bin/python"), str(MACHINE / script), *arguments]
    variables = os.environ | {
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "TRITON_CACHE_DIR": str(libraries / "triton"),
    }
    print(f"{script} ...", flush=True)
    done = subprocess.run(command, env=variables, cwd=libraries, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"{script}: exit code {done.returncode}\n{done.stdout[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
