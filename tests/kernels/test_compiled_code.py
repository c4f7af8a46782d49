"""Compiled code is loaded only if this user compiled it, where only this user can write, and undamaged."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pooch
import pytest

from longspan import private_folder
from longspan.home import home
from longspan.kernels import compiler

SOURCE = 'extern "C" int answer() { return 42; }\n'
FOREIGN = 'extern "C" int answer() { return 13; }\n'
NOBODY = 65534

pytestmark = pytest.mark.skipif(not compiler.can_compile(), reason="there is no compiler")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "user-cache" / name)
    yield
    compiler.compiled.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "small.cpp"
    path.write_text(SOURCE)
    return path


def answer(source: Path) -> int:
    """What a new process would get."""
    compiler.compiled.cache_clear()
    library = compiler.compiled(source)
    assert library is not None
    return int(library.answer())


def compile_only(source: Path) -> None:
    """Compile without loading: the loader would return the same library for the same path again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ctypes.CDLL", lambda path: path)
        compiler.compiled.cache_clear()
        compiler.compiled(source)


def stored(folder: Path) -> Path:
    (library,) = folder.glob("small-*.so")
    return library


def replace_by_foreign(library: Path, tmp_path: Path) -> None:
    """Another library with the right name and checksum, as an attacker would make it."""
    other = tmp_path / "foreign.cpp"
    other.write_text(FOREIGN)
    compiler._run([*compiler._compiler(), "-shared", "-fPIC", other, "-o", tmp_path / "foreign.so"])
    private_folder.add_checksum(tmp_path / "foreign.so")
    library.write_bytes((tmp_path / "foreign.so").read_bytes())
    library.chmod(0o600)


def test_the_folder_and_the_library_are_for_their_owner_only(source: Path) -> None:
    before = os.umask(0o002)
    try:
        assert answer(source) == 42
    finally:
        os.umask(before)
    folder = home() / "compiled"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(stored(folder).stat().st_mode) == 0o600


def test_it_is_compiled_once(source: Path) -> None:
    answer(source)
    before = stored(home() / "compiled").stat().st_mtime_ns
    assert answer(source) == 42
    assert stored(home() / "compiled").stat().st_mtime_ns == before


def test_the_check_is_what_protects(source: Path, tmp_path: Path) -> None:
    """The planted library of the tests below works: this user may replace it and it is loaded."""
    compile_only(source)
    replace_by_foreign(stored(home() / "compiled"), tmp_path)
    assert answer(source) == 13


@as_root
def test_a_library_of_another_user_is_not_loaded(source: Path, tmp_path: Path) -> None:
    compile_only(source)
    library = stored(home() / "compiled")
    replace_by_foreign(library, tmp_path)
    os.chown(library, NOBODY, NOBODY)
    assert answer(source) == 42
    assert stored(home() / "compiled").stat().st_uid == os.geteuid()


def test_a_library_that_others_can_write_to_is_not_loaded(source: Path, tmp_path: Path) -> None:
    compile_only(source)
    replace_by_foreign(stored(home() / "compiled"), tmp_path)
    stored(home() / "compiled").chmod(0o666)
    assert answer(source) == 42


def test_a_link_is_not_loaded(source: Path, tmp_path: Path) -> None:
    compile_only(source)
    library = stored(home() / "compiled")
    replace_by_foreign(library, tmp_path)
    library.unlink()
    library.symlink_to(tmp_path / "foreign.so")
    assert answer(source) == 42


def make_writable(tmp_path: Path) -> None:
    (home() / "compiled").chmod(0o777)


def make_home_writable(tmp_path: Path) -> None:
    home().chmod(0o777)


def make_writable_for_a_group(tmp_path: Path) -> None:
    os.chown(home() / "compiled", os.geteuid(), NOBODY)
    (home() / "compiled").chmod(0o770)


def give_away(tmp_path: Path) -> None:
    os.chown(home() / "compiled", NOBODY, NOBODY)


def give_home_away(tmp_path: Path) -> None:
    os.chown(home(), NOBODY, NOBODY)


@pytest.mark.parametrize(
    "share",
    [
        make_writable,
        make_home_writable,
        pytest.param(make_writable_for_a_group, marks=as_root),
        pytest.param(give_away, marks=as_root),
        pytest.param(give_home_away, marks=as_root),
    ],
)
def test_a_folder_that_others_can_write_to_is_not_used(source: Path, tmp_path: Path, share) -> None:
    compile_only(source)
    library = stored(home() / "compiled")
    replace_by_foreign(library, tmp_path)
    share(tmp_path)
    assert answer(source) == 42
    folder = tmp_path / "user-cache" / "longspan" / "compiled"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stored(folder).is_file()


def test_a_private_folder_below_tmp_is_used(tmp_path: Path) -> None:
    """Its sticky bit keeps others from replacing the folder."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    (tmp_path / "tmp" / "mine").mkdir(mode=0o700)
    assert private_folder.is_private(tmp_path / "tmp" / "mine")
    (tmp_path / "tmp").chmod(0o777)
    assert not private_folder.is_private(tmp_path / "tmp" / "mine")


def test_without_a_private_folder_it_is_compiled_for_this_process(source: Path, tmp_path: Path) -> None:
    compile_only(source)
    replace_by_foreign(stored(home() / "compiled"), tmp_path)
    make_writable(tmp_path)
    (tmp_path / "user-cache").write_text("a file, so no folder can be made in it")
    private_folder._folder_of_this_process.cache_clear()
    with pytest.warns(UserWarning, match="others can write to .*compiled.* set LONGSPAN_HOME"):
        assert answer(source) == 42
    folder = private_folder._folder_of_this_process()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stored(folder).is_file()


@pytest.mark.parametrize("place", [0, 5000, -40, -1, "cut", "empty"])
def test_a_damaged_library_is_compiled_again(source: Path, place: int | str) -> None:
    compile_only(source)
    library = stored(home() / "compiled")
    content = bytearray(library.read_bytes())
    whole = bytes(content)
    if isinstance(place, int):
        content[place] ^= 0x10
    library.write_bytes({"cut": content[: len(content) // 2], "empty": b""}.get(str(place), content))
    assert not private_folder.is_ours(library)
    assert answer(source) == 42
    assert library.read_bytes() == whole
