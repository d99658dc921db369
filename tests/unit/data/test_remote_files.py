"""Files at an address are read like local ones. `memory://` takes the place of the hub: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from verl.data.files import FileSet, find_files
from verl.data.remote_files import fetch_files, is_remote
from verl.data.validate import find_file_problems
from verl.errors import DataError

pytestmark = pytest.mark.unit


class Hub(MemoryFileSystem):
    """A file system with the protocol of the hub, which counts downloads."""

    protocol = "hf"
    root_marker = "/"
    store: dict = {}  # noqa: RUF012 - as in fsspec
    pseudo_dirs = [""]  # noqa: RUF012
    downloads = 0

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("hf://").strip("/")

    def get_file(self, rpath, lpath, callback=None, outfile=None, **kwargs):
        type(self).downloads += 1
        Path(lpath).write_bytes(self.cat_file(rpath))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    monkeypatch.setenv("HOME", str(tmp_path))
    fsspec.register_implementation("hf", Hub, clobber=True)
    Hub.store.clear()
    Hub.downloads = 0
    yield Hub()
    from huggingface_hub import HfFileSystem

    fsspec.register_implementation("hf", HfFileSystem, clobber=True)


def put(hub: Hub, path: str, *prompts: str) -> None:
    hub.pipe(path, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts).encode())


def test_a_file_of_the_hub_is_read_and_copied_once(hub: Hub) -> None:
    put(hub, "hf://datasets/me/sums/train.jsonl", "1+1", "2+2")
    address = "hf://datasets/me/sums/train.jsonl"
    for _ in range(2):
        files = FileSet(address)
        assert [files.files[0].row(index)["prompt"] for index in range(files.total_rows)] == ["1+1", "2+2"]
        assert files.name == "train.jsonl"
    assert Hub.downloads == 1
    put(hub, address, "3+3")
    assert FileSet(address).total_rows == 1, "a new version is copied again"


def test_patterns_and_local_paths_can_be_mixed(hub: Hub, tmp_path: Path) -> None:
    for name in ("b", "a"):
        put(hub, f"hf://datasets/me/sums/{name}.jsonl", name)
    (tmp_path / "c.jsonl").write_text('{"prompt": "c"}\n')
    names = [path.name for path in find_files(["hf://datasets/me/sums/*.jsonl", str(tmp_path / "c.jsonl")])]
    assert names == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_problems_name_the_address_and_a_fix(hub: Hub, tmp_path: Path) -> None:
    [problem] = find_file_problems("hf://datasets/me/none.parquet", {})
    assert problem.startswith("data file not found: hf://datasets/me/none.parquet does not exist")
    with pytest.raises(DataError, match="the pattern matches no file"):
        fetch_files("hf://datasets/me/*.parquet")
    put(hub, "hf://datasets/me/sums/a.jsonl", "a")
    with pytest.raises(DataError, match="it is a folder"):
        fetch_files("hf://datasets/me/sums")
    with pytest.raises(DataError, match="nonsense://x cannot be opened: Protocol not known: nonsense"):
        fetch_files("nonsense://x")


def test_a_copy_that_fails_leaves_nothing(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(hub, "hf://datasets/me/a.jsonl", "a")

    def fail(self: Hub, rpath: str, lpath: str, **_: object) -> None:
        Path(lpath).write_text("half")
        raise ConnectionError("lost")

    monkeypatch.setattr(Hub, "get_file", fail)
    with pytest.raises(DataError, match="cannot be read: lost"):
        fetch_files("hf://datasets/me/a.jsonl", tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_memory_is_an_address_and_paths_are_not(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("memory://sums/train.jsonl", b'{"prompt": "1"}\n')
    [path] = fetch_files("memory://sums/train.jsonl", tmp_path)
    assert path.read_bytes() == b'{"prompt": "1"}\n'
    assert is_remote("https://host/train.parquet")
    assert not any(map(is_remote, ("train.parquet", "/data/a:b/c.parquet", "~/x", "C:/x", tmp_path)))
