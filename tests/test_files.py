"""Files and folders appear whole or not at all, for whom the umask lets read, and nothing is left over."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longspan import files
from longspan.files import whole_file, whole_folder
from longspan.runs import checkpoint


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class TestPermissions:
    def test_a_file(self, tmp_path: Path, umask: int) -> None:
        with whole_file(tmp_path / "file") as partial:
            partial.write_text("text")
        assert permissions(tmp_path / "file") == 0o666 & ~umask

    def test_a_file_that_a_library_writes_for_the_owner_only(self, tmp_path: Path, umask: int) -> None:
        checkpoint.save(tmp_path / "last.safetensors", {"a": torch.ones(1)}, {})
        assert permissions(tmp_path / "last.safetensors") == 0o666 & ~umask

    def test_a_folder_and_what_is_in_it(self, tmp_path: Path, umask: int) -> None:
        with whole_folder(tmp_path / "folder") as partial:
            (partial / "inner").mkdir()
            (partial / "inner" / "secret").touch(mode=0o600)
        assert permissions(tmp_path / "folder") == 0o777 & ~umask
        assert permissions(tmp_path / "folder" / "inner") == 0o777 & ~umask
        assert permissions(tmp_path / "folder" / "inner" / "secret") == 0o666 & ~umask


class TestFailure:
    def test_a_file_stays_as_it_was(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("before")
        with pytest.raises(UnicodeEncodeError), whole_file(tmp_path / "file") as partial:
            partial.write_text("half of it, then ß", encoding="ascii")
        assert (tmp_path / "file").read_text() == "before"
        assert len(list(tmp_path.iterdir())) == 1

    def test_a_folder_does_not_appear(self, tmp_path: Path) -> None:
        with pytest.raises(FileExistsError), whole_folder(tmp_path / "folder") as partial:
            partial.mkdir()
        assert list(tmp_path.iterdir()) == []


class TestSomebodyWasFaster:
    def write(self, folder: Path, *, first_wins: bool) -> None:
        with whole_folder(folder, first_wins=first_wins) as partial:
            (partial / "ours").touch()
            folder.mkdir()
            (folder / "theirs").touch()

    def test_for_a_cache_that_is_as_good(self, tmp_path: Path) -> None:
        self.write(tmp_path / "folder", first_wins=True)
        assert [entry.name for entry in tmp_path.rglob("*")] == ["folder", "theirs"]

    def test_else_it_is_an_error_and_theirs_stays(self, tmp_path: Path) -> None:
        with pytest.raises(FileExistsError):
            self.write(tmp_path / "folder", first_wins=False)
        assert [entry.name for entry in tmp_path.rglob("*")] == ["folder", "theirs"]


KILLED = """
import os, pathlib, signal, sys
from longspan import files
with getattr(files, sys.argv[1])(pathlib.Path(sys.argv[2])) as partial:
    (partial / "half" if partial.is_dir() else partial).write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["whole_file", "whole_folder"])
def test_what_a_killed_writer_left_goes_when_the_target_is_written_again(tmp_path: Path, kind: str) -> None:
    for target in ("target", "other"):
        done = subprocess.run([sys.executable, "-c", KILLED, kind, str(tmp_path / target)], check=False)
        assert done.returncode == -signal.SIGKILL
    (other,) = tmp_path.glob(".other.*.part")
    (left,) = tmp_path.glob(".target.*.part")
    # The same on another machine that shares the disk: whether that process lives cannot be known here.
    elsewhere = left.with_name(left.name.replace("@", "@elsewhere-"))
    elsewhere.touch()
    write = getattr(files, kind)
    with write(tmp_path / "target") as living:
        assert not left.exists()
        with write(tmp_path / "target"):
            assert living.exists()
    assert set(tmp_path.iterdir()) == {tmp_path / "target", other, elsewhere}
