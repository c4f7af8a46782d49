"""Hostile checkpoints: nothing in them is imported or called, and the answer is a value or one line.

An audit hook sees every import and every call that runs code or starts a program.
"""

from __future__ import annotations

import encodings.cp437  # noqa: F401  zipfile imports it at its first use
import io
import pickle
import random
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.errors import UserError
from longspan.interop.modules import named
from longspan.interop.original import read_original
from longspan.interop.pickles import Global, StandIn
from longspan.interop.torch_file import MAGIC, PROTOCOL, read_torch_file
from tests.interop.checkpoints import Original

WATCHED = {
    "import",
    "exec",
    "compile",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "pty.spawn",
}
_seen: list[str] | None = None


def _hook(event: str, arguments: Any) -> None:
    if _seen is not None and (event in WATCHED or event.startswith(("socket.", "shutil.", "ctypes."))):
        _seen.append(f"{event} {arguments!r}"[:200])


sys.addaudithook(_hook)  # it stays for ever, and does nothing outside of `watched`


@contextmanager
def watched() -> Iterator[None]:
    global _seen
    _seen = []
    try:
        yield
        assert not _seen
    finally:
        _seen = None


@pytest.fixture(autouse=True, scope="module")
def everything_imported(tmp_path_factory) -> None:
    """What reading itself imports is there before anything is watched."""
    path = tmp_path_factory.mktemp("first") / "c.pt"
    for legacy in (False, True):
        torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=not legacy)
        read_torch_file(path)
    path.write_bytes(b"cposix\nsystem\n(S'a\\x41'\ntR.")
    answer(path)


def answer(path: Path) -> Any:
    """What is read, or the line that says why it is not; all else fails the test."""
    try:
        contents = read_torch_file(path)
        return contents.value, named(contents.value)
    except UserError as problem:
        found = problem
    assert "\n" not in str(found)
    assert len(str(found)) < 300
    return found


# --- pickles as text, put together from opcodes --------------------------------------------------------

CALLS = {  # what a hostile file would call, and the arguments as opcodes
    "posix system": b"S'touch %s'\n",
    "os system": b"S'touch %s'\n",
    "builtins eval": b"S\"open('%s', 'w')\"\n",
    "builtins exec": b"S\"open('%s', 'w')\"\n",
    "__builtin__ eval": b"S\"open('%s', 'w')\"\n",
    "builtins open": b"S'%s'\nS'w'\n",
    "builtins __import__": b"S'antigravity'\n",
    "builtins getattr": b"cos\nsystem\nS'__call__'\n",
    "subprocess Popen": b"(lS'touch'\naS'%s'\na",
    "subprocess check_output": b"(lS'touch'\naS'%s'\na",
    "importlib import_module": b"S'antigravity'\n",
    "torch load": b"S'%s'\n",
    "torch.hub load": b"S'%s'\n",
    "pathlib Path": b"S'%s'\n",
    "webbrowser open": b"S'%s'\n",
    "shutil rmtree": b"S'%s'\n",
    "operator attrgetter": b"S'system'\n",
    "functools partial": b"cos\nsystem\nS'touch %s'\n",
    "torch._utils _rebuild_tensor_v2": b"cos\nsystem\nI0\n(I2\nt(I1\nt",
    "torch._utils _rebuild_parameter": b"cos\nsystem\nI01\nN",
    "torch._tensor _rebuild_from_type_v2": b"cos\nsystem\ncos\nsystem\n(S'touch %s'\ntN",
    "collections OrderedDict": b"(l(cos\nsystem\nS'touch %s'\nlacos\nsystem\na",
    "copyreg _reconstructor": b"cos\nsystem\ncbuiltins\nobject\nN",
}


def split(name: str) -> tuple[bytes, bytes]:
    module, function = name.encode().split()
    return module, function


def by_reduce(name: str, arguments: bytes) -> bytes:
    module, function = split(name)
    return b"c%b\n%b\n(%btR" % (module, function, arguments)


def by_computed_name(name: str, arguments: bytes) -> bytes:
    module, function = split(name)
    text = b"".join(b"X%b%b" % (struct.pack("<I", len(part)), part) for part in (module, function))
    return b"%b\x93(%btR" % (text, arguments)


def by_instance(name: str, arguments: bytes) -> bytes:
    module, function = split(name)
    return b"(%bi%b\n%b\n" % (arguments, module, function)


def by_object(name: str, arguments: bytes) -> bytes:
    module, function = split(name)
    return b"(c%b\n%b\n%bo" % (module, function, arguments)


def by_new(name: str, arguments: bytes) -> bytes:
    module, function = split(name)
    return b"c%b\n%b\n(%bt\x81" % (module, function, arguments)


def by_new_with_names(name: str, arguments: bytes) -> bytes:
    module, function = split(name)
    return b"c%b\n%b\n(%bt}\x92" % (module, function, arguments)


def by_build(name: str, arguments: bytes) -> bytes:
    """An object whose __setstate__ or __dict__ would be the call."""
    module, function = split(name)
    return b"ccollections\nUserDict\n)\x81}S'__setstate__'\nc%b\n%b\nsb(%btb" % (module, function, arguments)


def by_result(name: str, arguments: bytes) -> bytes:
    """Call what another call returned."""
    return b"cbuiltins\ngetattr\n(c%b\n%b\nS'__call__'\ntR(%btR" % (*split(name), arguments)


WAYS: list[Callable[[str, bytes], bytes]] = [
    *(by_reduce, by_computed_name, by_instance, by_object, by_new, by_new_with_names, by_build, by_result),
]


def as_file(body: bytes, form: str, path: Path) -> Path:
    """A checkpoint whose model is `body`: a pickle alone, in torch's older format, or in a zip archive."""
    whole = b"\x80\x02}S'model'\n%bs." % body
    if form == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", whole)
    elif form == "legacy":
        first = [MAGIC, PROTOCOL, {"protocol_version": PROTOCOL, "little_endian": True}]
        path.write_bytes(b"".join(pickle.dumps(part, 2) for part in first) + whole + pickle.dumps([], 2))
    else:
        path.write_bytes(whole)
    return path


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["plain", "legacy", "zip"])
def test_no_call_is_made(tmp_path, way, form):
    """Eight ways of a pickle to call something, in three formats, for each function."""
    mark = tmp_path / "ran"
    for name, arguments in CALLS.items():
        arguments = arguments.replace(b"%s", str(mark).encode())
        path = as_file(way(name, arguments), form, tmp_path / "c.pt")
        with watched():
            found = answer(path)
            with pytest.raises(UserError) as caught:
                read_original(path, "transformer-xl")
        assert "\n" not in str(caught.value)
        assert not mark.exists()
        if not isinstance(found, UserError):
            assert inert(found[0]["model"])


def inert(value: Any) -> bool:
    return value is None or isinstance(value, StandIn | Global | str | dict | int | tuple)


FAULTS = {
    "no opcode": b"\xff.",
    "nothing": b"",
    "only stop": b".",
    "two values": b"NN.",
    "pop of nothing": b"0.",
    "mark without end": b"((((.",
    "tuple of too few": b"N\x87.",
    "memo that is missing": b"h\x07.",
    "huge memo index": b"Nr\xff\xff\xff\xff.",
    "put of nothing": b"q\x00.",
    "extension": b"\x82\x01.",
    "extension of four bytes": b"\x84\xff\xff\xff\x7f.",
    "bytes beyond the file": b"\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.",
    "text beyond the file": b"\x8d\xff\xff\xff\xff\xff\xff\xff\x0f.",
    "array beyond the file": b"\x96\xff\xff\xff\xff\xff\xff\xff\x0f.",
    "number of negative length": b"\x8b\xff\xff\xff\xff.",
    "buffer from elsewhere": b"\x97.",
    "protocol 200": b"\x80\xc8N.",
    "frame beyond the file": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xffN.",
    "persistent number": b"K\x01Q.",
    "persistent text": b"Pwhat\n.",
    "persistent storage without parts": b"(S'storage'\ntQ.",
    "persistent module that is called": b"(S'module'\nK\x07tQ)R.",
    "key that is a list": b"}]Ns.",
    "append to a number": b"K\x01Na.",
    "item of a number": b"K\x01NNs.",
    "member of a set that is a list": b"\x8f(]\x90.",
    "key without a value": b"(Nd.",
    "attributes of a number": b"K\x01}b.",
    "attributes of a list": b"]}b.",
    "call of text": b"S'os.system'\n)R.",
    "call without a tuple": b"cos\nsystem\nNR.",
    "class without a name": b"NN\x93.",
    "name of one word": b"cos\n\n.",
    "long decimal number": b"L" + b"9" * 100_000 + b"L\n.",
    "escape that is none": b"S'\\q\\xzz'\n.",
    "text that is no text": b"X\x02\x00\x00\x00\xff\xff.",
}


@pytest.mark.parametrize("form", ["plain", "legacy", "zip"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_malformed_pickle_is_a_value_or_one_line(tmp_path, name, form):
    path = as_file(b"N", form, tmp_path / "c.pt")
    body = FAULTS[name]
    if form == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", body)
    elif form == "legacy":
        content = path.read_bytes()
        path.write_bytes(content[: content.index(b"}S'model'")] + body)
    else:
        path.write_bytes(body)
    with watched():
        found = answer(path)
    harmless = {"huge memo index", "name of one word", "frame beyond the file", "two values"}
    assert isinstance(found, UserError) or name in harmless


def test_deep_and_doubled_values_take_no_time(tmp_path):
    path = tmp_path / "c.pt"
    path.write_bytes(b"(" * 200_000 + b"t" * 199_999 + b"l.")
    assert not isinstance(answer(path), UserError)
    path.write_bytes(b")" + b"2\x86" * 5000 + b".")  # a tuple of two, each of two ...
    assert not isinstance(answer(path), UserError)
    path.write_bytes(b"}" + b")" + b"2\x86" * 60 + b"Ns.")  # ... as a key
    assert "not a plain value" in str(answer(path))


@pytest.mark.parametrize(
    "again",
    [
        b"0cbuiltins\nlist\n(h\x00tR",
        b"0cbuiltins\nset\n(h\x00tR",
        b"0ctorch\nSize\n(h\x00tR",
        b"0ccollections\nOrderedDict\n(h\x01tR",
        b"0cmodel\nNet\n)\x81h\x01b",
    ],
)
def test_the_same_copy_again_and_again_is_refused(tmp_path, again):
    """Otherwise a small file fills the memory."""
    numbers = b"(" + b"".join(b"J%b" % struct.pack("<i", number) for number in range(20_000)) + b"lq\x00"
    entries = b"0(" + b"".join(b"I%d\nN" % number for number in range(20_000)) + b"dq\x01"
    path = tmp_path / "c.pt"
    path.write_bytes(numbers + entries + again * 5000 + b".")
    assert "copies more than the file has" in str(answer(path))


def test_names_that_repeat_a_wrapper_or_are_long_take_no_time(tmp_path):
    torch.save({"module." * 5000 + "x": torch.ones(1)}, tmp_path / "c.pt")
    assert not isinstance(answer(tmp_path / "c.pt"), UserError)
    (tmp_path / "c.pt").write_bytes(b"\x80\x04X\x00\x00\x01\x00%b\x8cos\x93." % (b"a" * 65536))
    assert isinstance(answer(tmp_path / "c.pt"), UserError)


def module(parts: bytes) -> bytes:
    return b"cmodel\nNet\n)\x81}(S'_parameters'\n}S'_buffers'\n}S'_modules'\n}%bub" % parts


def test_modules_that_contain_themselves_or_double_are_refused(tmp_path):
    path = tmp_path / "c.pt"
    loop = b"cmodel\nNet\n)\x81q\x00}(S'_parameters'\n}S'_modules'\n}S'a'\nh\x00sub."
    path.write_bytes(loop)
    assert "contains itself" in str(answer(path))
    doubled = module(b"")
    for _ in range(60):
        doubled += b"q\x010" + module(b"S'x'\nN").replace(
            b"S'_modules'\n}", b"S'_modules'\n}(S'a'\nh\x01S'b'\nh\x01u"
        )
    path.write_bytes(doubled + b".")
    assert "too many modules" in str(answer(path))


# --- tensors and storages -----------------------------------------------------------------------------


def tensor(
    count: int, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...], kind="FloatStorage"
) -> bytes:
    def number(value: int) -> bytes:
        return b"L%dL\n" % value

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(%bt" % b"".join(map(number, values))

    storage = b"(S'storage'\nctorch\n%b\nS'0'\nS'cpu'\n%btQ" % (kind.encode(), number(count))
    shape = number(offset) + numbers(sizes) + numbers(strides)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(%b%bI00\nNtR" % (storage, shape)


IMPOSSIBLE = [
    (4, 0, (5,), (1,)),
    (4, 1, (4,), (1,)),
    (4, 5, (0,), (1,)),
    (4, 0, (2, 2), (3, 2)),
    (4, -1, (1,), (1,)),
    (4, 0, (-1,), (1,)),
    (4, 3, (2,), (-1,)),
    (4, 0, (2,), (1, 1)),
    (4, 0, (2**62, 2**62), (0, 0)),
    (4, 0, (0, 2**62, 2**62), (1, 1, 1)),
    (4, 0, (1 << 20, 1 << 20), (0, 0)),
    (4, 0, (2**70,), (1,)),
    (5, 0, (1,), (1,)),
    (2**62, 0, (1,), (1,)),
    (-4, 0, (1,), (1,)),
    (4, 0, (1,) * 100, (1,) * 100),
]


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_tensor_lies_inside_its_storage(tmp_path, legacy):
    def saved(*shape: Any, **more: Any) -> Any:
        path, body = tmp_path / "c.pt", b"\x80\x02" + tensor(*shape, **more) + b"."
        content = torch.arange(4.0).numpy().tobytes()
        if legacy:
            first = [MAGIC, PROTOCOL, {"protocol_version": PROTOCOL, "little_endian": True}]
            start = b"".join(pickle.dumps(part, 2) for part in first)
            path.write_bytes(start + body + pickle.dumps(["0"], 2) + struct.pack("<q", 4) + content)
        else:
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("archive/data.pkl", body)
                archive.writestr("archive/data/0", content)
        with watched():
            return answer(path)

    assert saved(4, 1, (3,), (1,))[0].tolist() == [1.0, 2.0, 3.0]
    assert saved(4, 0, (2, 2), (1, 2))[0].tolist() == [[0.0, 2.0], [1.0, 3.0]]
    assert saved(4, 0, (0, 3), (3, 1))[0].shape == (0, 3)
    for shape in IMPOSSIBLE:
        assert isinstance(saved(*shape), UserError), shape
    assert "is not known" in str(saved(4, 0, (1,), (1,), kind="HugeStorage"))


def test_an_archive_larger_than_its_file_is_refused(tmp_path):
    path = tmp_path / "c.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + tensor(1 << 20, 0, (1,), (1,)) + b".")
        archive.writestr("archive/data/0", bytes(4 << 20))
    assert "is compressed" in str(answer(path))


# --- good files with changed bytes --------------------------------------------------------------------


@pytest.fixture(scope="module")
def good() -> dict[str, bytes]:
    tensors = dict(list(Original.of("fixed_span").tensors.items())[:3])
    contents = {
        "model": {
            name: tensor[:2, :2].clone() if tensor.dim() == 2 else tensor[:1]
            for name, tensor in tensors.items()
        },
        "n": [1, 2.5, ("a", None)],
    }
    files = {}
    for legacy in (False, True):
        file = io.BytesIO()
        torch.save(contents, file, _use_new_zipfile_serialization=not legacy)
        files["legacy" if legacy else "zip"] = file.getvalue()
    return files


@pytest.mark.parametrize("form", ["zip", "legacy"])
@pytest.mark.parametrize("seed", range(40))
def test_changed_bytes_are_a_value_or_one_line(tmp_path, good, form, seed):
    """Ten files for each seed: bytes replaced, removed or doubled, or the end cut off."""
    rng, path = random.Random(f"{form} {seed}"), tmp_path / "c.pt"
    for _ in range(10):
        content = bytearray(good[form])
        # The pickle is near the beginning of both formats; most changes belong there.
        reach = len(content) if rng.random() < 0.3 else min(len(content), 900)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(reach)
            kind = rng.randrange(4)
            if kind < 2:
                content[at] = (
                    rng.choice(b"\x00\x01\xff.(0RbioQ\x81\x92\x93ctqhru") if kind else rng.randrange(256)
                )
            elif kind == 2:
                del content[at : at + rng.randint(1, 8)]
            else:
                content[at:at] = content[at : at + rng.randint(1, 8)]
        path.write_bytes(content[: rng.randrange(len(content))] if rng.random() < 0.2 else content)
        with watched():
            answer(path)


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_every_file_that_is_cut_off_is_refused(tmp_path, good, form):
    path = tmp_path / "c.pt"
    for length in range(0, len(good[form]), max(1, len(good[form]) // 60)):
        path.write_bytes(good[form][:length])
        with watched():
            found = answer(path)
        # The older format begins with whole pickles: a magic number alone is no checkpoint either.
        assert isinstance(found, UserError) or found[1] is None


def test_plain_pickles_of_every_protocol_are_values(tmp_path):
    value = {"a": [1, -(2**70), 2.5, True, None, "é", b"b", ("t", ()), {1, 2}, frozenset({"f"})], 3: {}}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "c.pt").write_bytes(pickle.dumps(value, protocol))
        found = answer(tmp_path / "c.pt")[0]
        if protocol >= 3:
            assert found == value
        assert found["a"][:6] == value["a"][:6]
