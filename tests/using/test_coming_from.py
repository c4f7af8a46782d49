"""Every command of docs/coming-from.md runs, on small data and with small sizes.

A section of the page is one test: its commands run in order, in a folder that holds the files they name.
Options that make a command quick are added to it; one that the command has already gets the small value:

- Named corpora are small files in `LONGSPAN_HOME`, with their checksums, as a download would have left them.
- `train` and `search` get two steps (or one epoch), two layers, narrow widths, short blocks and memories.
  Only options that the recipe or the command has are given. The command's own values must be valid too.
- `eval`, `generate`, `data` and `attention` get a limit of what they read or write.

A recipe in a `toml` block is written to the file that its first line names.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from longspan import recipes
from longspan.cli import COMMANDS, main, train
from longspan.cli.overrides import split_overrides
from longspan.config import RunConfig, schema
from longspan.config.reference import documented
from longspan.data import corpora
from longspan.interop import pretrained
from longspan.runs import RunFolder
from tests.interop.checkpoints import Original

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")

SIZES = {
    "num_layers": 2,
    "width": 16,
    "num_heads": 2,
    "head_width": 8,
    "inner_width": 32,
    "num_persistent": 4,
    "memory_length": 16,
    "long_memory_length": 32,
    "context": 16,
}
LINE = "Joey: how you doing? The cat sat on a mat.\n"
SYMBOLS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:;?!"
"""With the newline they are the 60 symbols of the recorded checkpoints."""


def sections() -> dict[str, str]:
    """The text of each section that has commands."""
    parts = re.split(r"^## (.*)\n", PAGE, flags=re.MULTILINE)[1:]
    named = dict(zip(parts[::2], parts[1::2], strict=True))
    return {name: text for name, text in named.items() if "```bash" in text}


def commands(section: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", section, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the page names, and small corpora."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpora, "_HELD_OUT_BYTES", 600)
    monkeypatch.setattr(train, "SAMPLE_TOKENS", 3)
    monkeypatch.setattr(pretrained, "download", published)
    monkeypatch.setenv("CXX", "no-compiler")  # to compile takes longer than all commands
    return tmp_path


def published(url: str, path: Path, *_: object) -> None:
    """Instead of a download: a small checkpoint of the same kind."""
    assert url.startswith(pretrained.SERVER)
    path.parent.mkdir(parents=True, exist_ok=True)
    Original.of("adaptive_span_basic").save(path)


def write_corpora(symbols: bytes) -> None:
    """Where a download would put them. Every line has all symbols, so that no split has one of its own."""
    lines = {
        "enwik8": (symbols + b"\n") * 80,
        "text8": b"the quick brown fox jumps over the lazy dog " * 100,
    }
    words = b" the cat sat on a <unk> mat \n a dog ran to the cat \n" * 60
    for name, archive in corpora.ARCHIVES.items():
        folder = corpora.folder_of(name)
        folder.mkdir(parents=True)
        text = lines.get(name, words)
        for file in archive.members.values():
            (folder / file).write_bytes(text)
        facts = {file: [len(text), zlib.crc32(text)] for file in archive.members.values()}
        (folder / "unpacked.json").write_text(json.dumps(facts))


def write_files(section: str, folder: Path) -> None:
    for text in re.findall(r"```toml\n(.*?)```", section, flags=re.DOTALL):
        (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
    for name in ("my-text.txt", "friends.txt"):
        (folder / name).write_text(LINE * 60)
    torch.save(notebook_weights(len(set(LINE))), folder / "model.pth")
    (folder / "unigrams.txt").write_text(" ".join(str(1 / rank) for rank in range(1, 60)))
    write_data_bin(folder / "data-bin")
    checkpoints = {
        "checkpoints/enwik8.pt": "adaptive_span_basic",
        "model/checkpoint_best.pt": "fairseq_adaptive_span",
        "model-xl/checkpoint_best.pt": "hf_transfo_xl_untie_r",
        "LM-TFM-enwik8/model.pt": "txl_basic",
        "ENWIK8.pt": "sha_rnn",
    }
    for place, case in checkpoints.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        made = Original.of(case)
        made.save(folder / place)
        if made.kind == "hf-transfo-xl":
            (folder / place).with_name("config.json").write_text(json.dumps(made.options))


def notebook_weights(
    vocabulary: int, width: int = 16, heads: int = 2, context: int = 16
) -> dict[str, Tensor]:
    """One layer with the names of uuzall/adaptive_attention_span: each head has its matrices and its span."""
    head = dict.fromkeys(("query", "key", "value"), (width // heads, width))
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding": (vocabulary, width),
        "position_embedding": (context, width),
        **{f"blocks.0.sa.heads.{n}.{part}": shape for n in range(heads) for part, shape in head.items()},
        "blocks.0.sa.proj": (width, width),
        "blocks.0.ff.net.0": (4 * width, width),
        "blocks.0.ff.net.2": (width, 4 * width),
        **dict.fromkeys(("blocks.0.ln1", "blocks.0.ln2", "ln_f"), (width,)),
        "lm_head": (vocabulary, width),
    }
    weights = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    biased = [name for name in shapes if not name.startswith("blocks.0.sa.heads") and "embedding" not in name]
    weights |= {f"{name}.bias": torch.randn(shapes[name][0]) for name in biased}
    for n in range(heads):
        weights[f"blocks.0.sa.heads.{n}.tril"] = torch.ones(context, context).tril()
        weights[f"blocks.0.sa.heads.{n}.adaptive_span.current_val"] = torch.full((1, 1, 1), 0.25 * n)
        weights[f"blocks.0.sa.heads.{n}.adaptive_span.mask_template"] = torch.arange(1.0 - context, 1.0)
    return weights


def write_data_bin(folder: Path) -> None:
    """As fairseq-preprocess writes it: 16-bit numbers, of which the first four are special, and sizes."""
    folder.mkdir()
    (folder / "dict.txt").write_text("".join(f"{32 + n} {900 - n}\n" for n in range(40)))
    for split in ("train", "valid", "test"):
        sentences = [np.arange(4, 44, dtype="<u2")] * 40
        sizes = np.array([len(sentence) for sentence in sentences], dtype="<i4")
        starts = np.concatenate([[0], np.cumsum(sizes[:-1] * 2)]).astype("<i8")
        (folder / f"{split}.bin").write_bytes(b"".join(sentence.tobytes() for sentence in sentences))
        head = b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, 8, len(sizes))
        (folder / f"{split}.idx").write_bytes(head + sizes.tobytes() + starts.tobytes())


def small_training(words: list[str]) -> list[str]:
    """Options that make a `train` or `search` command quick."""
    recipe = words[1] if not words[1].startswith("--") else None
    if recipe is None:  # of a run, whose model is small already
        sizes = ["--training.batch-size", "4", "--training.block-length", "16", "--training.device", "cpu"]
        return [*sizes, "--evaluation.batch-size", "2", "--stage.0.steps", "2"]
    table = recipes.load(recipe)
    given = [word for word in words if word.startswith("--") and "." in word]
    values = [words[words.index(name) + 1] for name in given]
    for name, value in split_overrides([part for pair in zip(given, values, strict=True) for part in pair]):
        schema.override(table, name, value)
    schema.read(RunConfig, table)
    options = {f"model.{name}": size for name, size in SIZES.items() if name in table["model"]}
    if isinstance(table["model"].get("span"), dict):
        options |= {"model.span.limit": SIZES["context"], "model.span.ramp": 4}
    vocabulary = table["model"].get("vocabulary", {})
    if vocabulary.get("cluster_widths"):
        options |= {"model.vocabulary.cluster_widths": "[16, 6, 4]"}
    elif vocabulary.get("cutoffs"):
        options |= {"model.vocabulary.division": 2}
    if vocabulary.get("cutoffs"):
        number = len(recipes.load(recipe)["model"]["vocabulary"]["cutoffs"])
        options |= {"model.vocabulary.cutoffs": str([2 * n for n in range(1, number + 1)])}
    if "vocabulary_size" in table["data"].get("tokenizer", {}):
        options |= {"data.tokenizer.vocabulary_size": 40}
    options |= {"training.device": "cpu", "training.batch_size": 4, "training.block_length": 16}
    options |= {"evaluation.batch_size": 2, "evaluation.max_tokens": 64, "evaluation.max_tokens_final": 64}
    options |= {"training.micro_batches": min(2, int(str(table["training"].get("micro_batches", 1))))}
    for number, stage in enumerate(table["stage"]):
        options |= {f"stage.{number}.epochs": 1} if "epochs" in stage else {f"stage.{number}.steps": 2}
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


SMALL: dict[str, Callable[[list[str]], list[str]]] = {
    "train": small_training,
    "search": small_training,
    "eval": lambda words: [
        "--max-tokens",
        "64",
        "--batch-size",
        "2",
        "--block-length",
        "16",
        "--device",
        "cpu",
    ],
    "generate": lambda words: ["--tokens", "3", "--device", "cpu"],
    "attention": lambda words: ["--tokens", "64", "--device", "cpu"],
    "data": lambda words: ["--vocabulary-size", "40"] if "--vocabulary-size" in words else [],
}


def with_options(words: list[str], options: list[str]) -> list[str]:
    """The words of a command with other values for options that it has, and further options at its end."""
    words = list(words)
    for name, value in zip(options[::2], options[1::2], strict=True):
        if name in words:
            words[words.index(name) + 1] = value
        else:
            words += [name, value]
    return words


@pytest.mark.parametrize("name", sections())
def test_every_command_runs(name: str, reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = sections()[name]
    write_corpora(SYMBOLS + b"~" if name == "Transformer-XL" else SYMBOLS)  # it does not read newlines
    write_files(section, reader)
    for command in commands(section):
        words = shlex.split(command)[1:]
        words = with_options(words, SMALL.get(words[0], lambda words: [])(words))
        assert main(words) == 0, f"{command}\n{shlex.join(words)}\n{capsys.readouterr().err}"
        shown = capsys.readouterr()
        assert shown.out.strip() or shown.err.strip(), command
        check_outputs(words)


def check_outputs(words: list[str]) -> None:
    if "--out" not in words:
        return
    out = Path(words[words.index("--out") + 1])
    if words[0] not in ("train", "search", "import"):
        assert out.stat().st_size > 0
        return
    assert RunFolder.open(out).checkpoint("best").is_file()
    if words[0] == "search":
        assert (out / "found.toml").is_file()


def test_the_page_says_longspan_only() -> None:
    """So that no command is left out because this file does not know its program."""
    every = [command for section in sections().values() for command in commands(section)]
    assert {command.split()[0] for command in every} == {"longspan"}
    assert len(every) > 40


def test_every_option_in_the_tables_is_one() -> None:
    """The second column of a table names options of commands, or dotted options of a recipe."""
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    for module in COMMANDS.values():
        module.register(subparsers)
    known = {f"--{option.name.replace('_', '-')}" for option in documented(RunConfig)}
    known |= {name.rpartition(".")[0] for name in known}  # whole tables, such as --model.span none
    for command in subparsers.choices.values():
        known |= set(re.findall(r"--[\w-]+", command.format_help()))
    cells = re.findall(r"^\|[^|]*\|([^|]*)\|[^|]*\|$", PAGE, flags=re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"--[a-z][\w.-]*", cell)}
    assert len(named) > 60
    assert sorted(named - known) == []
