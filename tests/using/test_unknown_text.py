"""Prepared files, where a token stands for a text that is unknown: no bits per byte anywhere."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import longspan
from longspan.cli import main
from longspan.data.tokenizers.number import NumberTokenizer
from longspan.data.tokenizers.word import WordTokenizer
from longspan.training.formatting import readable
from tests.search.searches import search_table
from tests.training.runs import metrics, small_table

OF_TEXT = {"bits_per_byte", "bits_per_character", "perplexity_per_word", "bytes", "characters", "words"}
KINDS = {
    "number": [str(n) for n in range(97, 110)],
    "adaptive-span": [str(n) for n in range(97, 110)],
    "sha-rnn": [*"abcdefgh", "_"],
}


def write_numbers(folder: Path, kind: str) -> Path:
    draw = random.Random(1)
    path = folder / "prepared.txt"
    lines = (" ".join(draw.choices(KINDS[kind], k=20)) for _ in range(200))
    path.write_text("\n".join(lines) + "\n")
    return path


def recipe(folder: Path, kind: str, table: dict[str, Any]) -> str:
    table["data"]["tokenizer"] = {"kind": kind}
    table["stage"] = [{"steps": 8, "learning_rate": 0.01}]
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps(table))
    return str(path)


def check_summary(shown: str, final: dict[str, Any]) -> None:
    assert "bits per byte  " not in shown
    assert "bits/byte" not in shown
    assert f"bits per token {final['test']['bits_per_token']:.4f} on the test split" in shown
    assert "the text of the tokens is unknown, so there are no bits per byte" in shown


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_eval(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, data = tmp_path / "run", write_numbers(tmp_path, kind)
    assert main(["train", recipe(tmp_path, kind, small_table(data)), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    lines = metrics(out)
    assert {line["kind"] for line in lines} == {"train", "valid", "final"}
    for line in [*lines, lines[-1]["valid"], lines[-1]["test"]]:
        assert not OF_TEXT & line.keys()
    assert lines[-1]["test"]["bits_per_token"] == pytest.approx(lines[-1]["test"]["loss"] / math.log(2))
    check_summary(printed.out, lines[-1])
    assert "bits/byte" not in printed.err
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    curves = {curve.rpartition("/")[2] for curve in events.Tags()["scalars"]}
    assert "loss" in curves
    assert not OF_TEXT & curves

    for options in ([], ["--data", str(data)]):
        assert main(["eval", str(out), *options, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert not OF_TEXT & found.keys()
        assert main(["eval", str(out), *options]) == 0
        shown = capsys.readouterr().out
        rows = {line[:22].strip(): line[22:] for line in shown.splitlines()[2:]}
        assert not {"bits per byte", "bits per character", "perplexity per word", "bytes"} & rows.keys()
        assert rows["bits per token"] == f"{found['bits_per_token']:.4f}"
        assert rows["perplexity per token"] == f"{found['perplexity']:,.3f}"
        assert "unknown" in rows["note"]
    assert math.isnan(longspan.evaluate(out, data).bits_per_byte)
    cost = longspan.load(out).score(" ".join(KINDS[kind][:3]))
    assert cost.bytes is None
    assert math.isnan(cost.bits_per_byte)


def test_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    table = search_table(write_numbers(tmp_path, "number"))
    assert main(["search", recipe(tmp_path, "number", table)]) == 0
    final = metrics(tmp_path / "runs" / "hunt")[-1]
    check_summary(capsys.readouterr().out, final)
    assert not OF_TEXT & final["test"]["soft"].keys()


def test_a_log_line_without_bits_per_byte() -> None:
    line = {"kind": "train", "step": 1, "loss": 2.0, "learning_rate": 0.1, "tokens_per_second": 5.0}
    assert readable(line) == "step 1  loss 2.0000  lr 0.1  5 tokens/s"


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (["<eos>", "60", "109", "101"], False),
        (["<eos>", "60", "109", "101", "<unk>"], False),
        (["_", "a", "b", "<eos>"], False),
        (["a", "b", "<eos>"], True),  # perhaps a text of short words
        (["60", "men", "<eos>"], True),
        (["<eos>"], True),
    ],
)
def test_which_words_are_a_text(words: list[str], known: bool) -> None:
    assert WordTokenizer(words, unknown="<unk>" in words).knows_text is known
    assert not NumberTokenizer(5).knows_text
