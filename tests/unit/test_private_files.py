"""What other users of the machine cannot read, replace or take."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from verl.errors import EngineError
from verl.private_files import ForeignFileError, create_private_file, get_user_folder, make_folder

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_folder_of_a_user_is_the_same_for_all_its_processes_and_closed_to_others(tmp_path: Path) -> None:
    assert get_user_folder() == get_user_folder() == tmp_path / f"verl-{os.getuid()}"
    assert get_user_folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["open", "foreign", "link", "dangling link", "file"])
def test_a_planted_folder_is_skipped(tmp_path: Path, kind: str) -> None:
    planted = tmp_path / f"verl-{os.getuid()}"
    if kind in ("open", "foreign"):
        planted.mkdir(mode=0o700)
        planted.chmod(0o777 if kind == "open" else 0o700)
        if kind == "foreign" and os.geteuid():
            pytest.skip("only root can make a folder of another user")
        os.chown(planted, 54321 if kind == "foreign" else -1, -1)
    elif kind == "file":
        planted.touch()
    else:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        planted.symlink_to(tmp_path / ("elsewhere" if kind == "link" else "nowhere"))
    assert get_user_folder() == get_user_folder() == tmp_path / f"verl-{os.getuid()}-1"


def test_if_all_names_are_taken_the_error_says_what_to_do(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"verl-{os.getuid()}{f'-{number}' if number else ''}").touch()
    with pytest.raises(EngineError, match=r"only you can enter.*TMPDIR"):
        get_user_folder()


def test_a_new_folder_is_closed_to_others_and_an_existing_one_stays_as_it_is(tmp_path: Path) -> None:
    make_folder(tmp_path / "project" / "run")
    assert (tmp_path / "project" / "run").stat().st_mode & 0o777 == 0o700
    (tmp_path / "project" / "run").chmod(0o750)
    make_folder(tmp_path / "project" / "run")
    assert (tmp_path / "project" / "run").stat().st_mode & 0o777 == 0o750


def test_a_file_is_created_once_for_its_owner_alone(tmp_path: Path) -> None:
    create_private_file(tmp_path / "file")
    (tmp_path / "file").write_text("kept")
    create_private_file(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.chown(tmp_path / "file", 54321, -1)
    with pytest.raises(ForeignFileError, match="belongs to another user"):
        create_private_file(tmp_path / "file")
