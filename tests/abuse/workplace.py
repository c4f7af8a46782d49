"""The folder in which all mistakes are made: a trained run, damaged copies of it, texts, recipes.

Everything is made once. Mistakes leave it as it is.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from longspan.cli import main

TEXT = "the cat sat on the mat, and the dog sat on the log.\n" * 120
SIZES = {
    "model.num_layers": 1,
    "model.width": 8,
    "model.num_heads": 2,
    "model.inner_width": 8,
    "model.span.limit": 8,
    "model.span.ramp": 2,
    "training.batch_size": 2,
    "training.block_length": 8,
    "training.device": "cpu",
    "training.evaluate_every": 2,
    "training.checkpoint_every": 2,
    "evaluation.batch_size": 2,
    "evaluation.max_tokens": 64,
    "evaluation.max_tokens_final": 64,
}
TINY = [f"--{name}={value}" for name, value in SIZES.items()]

RECIPE = """
[data]
corpus = "text.txt"
[model]
num_layers = 1
width = 8
num_heads = 2
inner_width = 8
[model.span]
limit = 8
ramp = 2
[training]
batch_size = 2
block_length = 8
evaluate_every = 2
checkpoint_every = 2
[[stage]]
steps = 4
learning_rate = 0.01
[evaluation]
batch_size = 2
max_tokens = 64
max_tokens_final = 64
"""


def build(place: Path) -> None:
    """Fill the current folder, which is `place`."""
    (place / "text.txt").write_text(TEXT)
    (place / "tiny.toml").write_text(RECIPE)
    for tokenizer in ("byte", "character", "word"):
        name = {"byte": "run"}.get(tokenizer, tokenizer)
        assert main(["train", "tiny.toml", "--out", name, f"--data.tokenizer.kind={tokenizer}"]) == 0
    make_texts(place)
    make_recipes(place)
    make_damaged(place)
    make_checkpoints(place)


def make_texts(place: Path) -> None:
    (place / "empty.txt").touch()
    (place / "line.txt").write_text("one")
    (place / "empty folder").mkdir()
    (place / "pictures").mkdir()
    (place / "pictures" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64))
    (place / "dangling.txt").symlink_to("nowhere.txt")
    (place / "circle.txt").symlink_to("circle.txt")
    (place / "counts.txt").write_text("5\n3\n1\n")
    (place / "words.txt").write_text("five\nthree\n")
    (place / "negative.txt").write_text("5\n-3\n")
    (place / "zeros.txt").write_text("0\n0\n0\n")
    (place / "probabilities.txt").write_text("0.5 0.3\n0.2\n")
    (place / "not-finite.txt").write_text("0.5 nan\n")
    (place / "taken").mkdir()
    (place / "taken.png").write_bytes(b"mine")
    (place / "taken.json").write_text("{}")
    (place / "shut").write_text("a file, no folder")
    os.mkfifo(place / "pipe")
    os.mkfifo(place / "pipe.toml")


STAGE = b"\n[[stage]]\nsteps = 4\nlearning_rate = 0.01\n"
RECIPES = {
    "unfinished": b"[model",
    "twice": b"[model]\nwidth = 8\nwidth = 9\n",
    "two-tables": b"[model]\nwidth = 8\n[model]\nnum_layers = 2\n",
    "not-text": b"\xff\xfe[\x00m\x00o\x00d\x00e\x00l\x00]\x00",
    "nul": b'name = "a\x00b"\n',
    "json": b'{"model": {"width": 8}}',
    "section": b"[modle]\nwidth = 8\n",
    "key": b"[model]\nwidht = 8\n",
    "nested-key": b"[model.span]\nlimits = 8\n",
    "text-for-number": b'[model]\nwidth = "wide"\n',
    "number-for-text": b"name = 7\n",
    "float-for-int": b"[model]\nwidth = 8.5\n",
    "bool-for-int": b"[model]\nwidth = true\n",
    "nan": b"[model]\ndropout = nan\n",
    "infinite": b"[[stage]]\nsteps = 2\nlearning_rate = inf\n",
    "negative": b"[model]\nwidth = -8\n",
    "zero": b"[model]\nwidth = 0\n",
    "huge": b"[model]\nwidth = 99999999999999999999999\n",
    "table-for-value": b"[model.width]\na = 1\n",
    "value-for-table": b"model = 3\n",
    "list-for-table": b"[[model]]\nwidth = 8\n",
    "table-for-list": b"[stage]\nsteps = 3\n",
    "stage-of-numbers": b"stage = [1, 2]\n",
    "stage-without-length": b"[[stage]]\nlearning_rate = 0.1\n",
    "no-stage": b"stage = []\n",
    "architecture": b'[model]\narchitecture = "transformer"\n',
    "architecture-number": b"[model]\narchitecture = 3\n",
    "heads": b"[model]\nwidth = 9\nnum_heads = 2\n",
    "pattern": b'[model]\npattern = "sxf"\n',
    "optimizer": b'[[stage]]\nsteps = 1\nlearning_rate = 0.1\noptimizer = "adamx"\n',
    "schedule": b'[[stage]]\nsteps = 1\nlearning_rate = 0.1\nschedule = "cosin"\n',
    "tokenizer": b'[data.tokenizer]\nkind = "syllable"\n',
    "tokenizer-size": b'[data.tokenizer]\nkind = "bpe"\nvocabulary_size = -4\n',
    "precision": b'[training]\nprecision = "float64x"\n',
    "plugins-text": b'plugins = "mine"\n',
    "plugins-missing": b'plugins = ["no_such_plugin"]\n',
    "plugins-path": b'plugins = ["../mine.py"]\n',
    "name-slash": b'name = "a/b"\n',
    "name-empty": b'name = ""\n',
    "dropout": b"[model]\ndropout = 1.5\n",
    "micro": b"[training]\nbatch_size = 2\nmicro_batches = 3\n",
    "block": b"[training]\nblock_length = 0\n",
    "cutoffs": b"[model.vocabulary]\ncutoffs = [5, 3]\n",
    "date": b"[model]\nwidth = 2026-01-01\n",
    "deep": b"[a" + b".a" * 2000 + b"]\nx = 1\n",
    "deep-list": b"x = " + b"[" * 5000 + b"]" * 5000 + b"\n",
    "control": b'name = "a\\u001b[31mb"\n',
}


def make_recipes(place: Path) -> None:
    for name, content in RECIPES.items():
        stage = b"" if b"stage" in content else STAGE
        (place / f"{name}.toml").write_bytes(content + stage)
    (place / "folder.toml").mkdir()


def make_damaged(place: Path) -> None:
    for name, damage in DAMAGE.items():
        shutil.copytree(place / "run", place / "damaged" / name)
        damage(place / "damaged" / name)


def _rewrite(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        path = run / file
        path.write_bytes(change(path.read_bytes()))

    return damage


def _remove(file: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        shutil.rmtree(run / file) if (run / file).is_dir() else (run / file).unlink()

    return damage


def _folder_for(file: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        _remove(file)(run)
        (run / file).mkdir()

    return damage


def _weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        for which in ("best", "last"):
            path = run / "checkpoints" / f"{which}.safetensors"
            with open(path, "rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            tensors = load_file(path)
            change(tensors)
            save_file(tensors, path, header.get("__metadata__"))

    return damage


def _one(tensors: dict[str, torch.Tensor]) -> str:
    return next(
        name for name, tensor in sorted(tensors.items()) if name.startswith("model.") and tensor.ndim == 2
    )


def _lose(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[_one(tensors)]


def _reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[_one(tensors)] = torch.zeros(3, 5)


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.surplus"] = torch.zeros(3)


def _spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors[_one(tensors)].fill_(torch.nan)


def _retype(tensors: dict[str, torch.Tensor]) -> None:
    tensors[_one(tensors)] = tensors[_one(tensors)].to(torch.int64)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


BEST, LAST = "checkpoints/best.safetensors", "checkpoints/last.safetensors"


def _both(damage: Callable[[str], Callable[[Path], None]]) -> Callable[[Path], None]:
    def damage_both(run: Path) -> None:
        for file in (BEST, LAST):
            damage(file)(run)

    return damage_both


DAMAGE: dict[str, Callable[[Path], None]] = {
    "config-missing": _remove("config.toml"),
    "config-empty": _rewrite("config.toml", lambda content: b""),
    "config-cut": _rewrite("config.toml", lambda content: content[: content.index(b"num_layers") + 12]),
    "config-not-text": _rewrite("config.toml", lambda content: b"\xff\xfe" + content),
    "config-folder": _folder_for("config.toml"),
    "config-key": _rewrite("config.toml", lambda content: content.replace(b"num_layers", b"num_leyers")),
    "config-type": _rewrite("config.toml", lambda content: content.replace(b"width = 8", b'width = "8"')),
    "config-wider": _rewrite("config.toml", lambda content: content.replace(b"\nwidth = 8", b"\nwidth = 16")),
    "config-deeper": _rewrite(
        "config.toml", lambda content: content.replace(b"num_layers = 1", b"num_layers = 2")
    ),
    "config-plugin": _rewrite("config.toml", lambda content: b'plugins = ["no_such_plugin"]\n' + content),
    "tokenizer-missing": _remove("tokenizer"),
    "tokenizer-empty": _folder_for("tokenizer"),
    "tokenizer-cut": lambda run: (
        [
            _rewrite(str(path.relative_to(run)), lambda content: content[: len(content) // 2])(run)
            for path in (run / "tokenizer").iterdir()
        ]
        and None
    ),
    "tokenizer-list": lambda run: (
        [path.write_text("[1, 2]") for path in (run / "tokenizer").iterdir()] and None
    ),
    "tokenizer-deep": lambda run: (run / "tokenizer" / "tokenizer.json").write_text("[" * 100_000) and None,
    "tokenizer-pipe": lambda run: _pipe(run / "tokenizer" / "tokenizer.json"),
    "weights-missing": _remove("checkpoints"),
    "weights-folder": _both(_folder_for),
    "weights-empty": _both(lambda file: _rewrite(file, lambda content: b"")),
    "weights-cut": _both(lambda file: _rewrite(file, lambda content: content[: len(content) // 2])),
    "weights-header": _both(lambda file: _rewrite(file, lambda content: b"\xff" * 8 + content[8:])),
    "weights-json": _both(lambda file: _rewrite(file, lambda content: content[:8] + b"x" + content[9:])),
    "weights-pickle": _both(lambda file: lambda run: torch.save({"a": torch.zeros(2)}, run / file)),
    "weights-lost": _weights(_lose),
    "weights-shape": _weights(_reshape),
    "weights-surplus": _weights(_add),
    "weights-nan": _weights(_spoil),
    "weights-type": _weights(_retype),
    "config-huge": _rewrite(
        "config.toml", lambda content: content.replace(b"\nwidth = 8", b"\nwidth = 1000000000")
    ),
    "spans-missing": _remove("spans.jsonl"),
    "spans-empty": _rewrite("spans.jsonl", lambda content: b""),
    "spans-text": _rewrite("spans.jsonl", lambda content: b"spans\n" + content),
    "spans-deep": _rewrite("spans.jsonl", lambda content: b"[" * 100_000 + b"\n" + content),
    "spans-nothing": _rewrite("spans.jsonl", lambda content: b'{"step": 1, "limit": 8, "spans": null}\n'),
    "spans-infinite": _rewrite(
        "spans.jsonl", lambda content: b'{"step": Infinity, "limit": 8, "spans": [[1]]}\n'
    ),
    "spans-words": _rewrite(
        "spans.jsonl", lambda content: b'{"step": 1, "limit": 8, "spans": [["a", "b"]]}\n'
    ),
    "spans-uneven": _rewrite(
        "spans.jsonl", lambda content: b'{"step": 1, "limit": 8, "spans": [[1, 2], [1]]}\n'
    ),
    "spans-none": _rewrite("spans.jsonl", lambda content: b'{"step": 1, "limit": 8, "spans": []}\n'),
    "spans-nan": _rewrite("spans.jsonl", lambda content: b'{"step": 1, "limit": 8, "spans": [[NaN, 1]]}\n'),
    "spans-layers": _rewrite(
        "spans.jsonl", lambda content: content + b'{"step": 9, "limit": 8, "spans": [[1, 1], [1, 1]]}\n'
    ),
    "spans-binary": _rewrite("spans.jsonl", lambda content: b"\xff\xfe" + content),
}


def make_checkpoints(place: Path) -> None:
    """Files that `longspan import` must refuse."""
    folder = place / "checkpoints"
    folder.mkdir()
    (folder / "empty.pt").touch()
    (folder / "text.pt").write_text("not a checkpoint")
    (folder / "folder.pt").mkdir()
    torch.save({"model": {}}, folder / "nothing.pt")
    torch.save([1, 2, 3], folder / "list.pt")
    torch.save(torch.zeros(3), folder / "tensor.pt")
    torch.save({"model": {"a": torch.zeros(3)}}, folder / "foreign.pt")
    whole = (folder / "foreign.pt").read_bytes()
    (folder / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (folder / "flipped.pt").write_bytes(
        bytes(byte ^ 255 if 60 < at < 120 else byte for at, byte in enumerate(whole))
    )
    (folder / "code.pt").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    torch.save({"model": _Code()}, folder / "code-zip.pt")
    torch.save({"model": {"a": torch.full((3,), torch.nan)}}, folder / "nan.pt")
    (folder / "bad.json").write_text("{")
    (folder / "list.json").write_text("[]")
    (folder / "deep.json").write_text("[" * 100_000)


class _Code:
    """A pickle that would run a command."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch executed",)
