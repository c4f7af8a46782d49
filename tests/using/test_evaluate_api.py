"""`longspan.evaluate`: the numbers of the command, and no text is tokenized twice."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import longspan
from longspan.cli import main
from longspan.config import DataConfig
from longspan.data import preparation, prepare
from longspan.data.corpus import SPLITS
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.errors import UserError
from longspan.evaluation import Score
from longspan.home import home
from longspan.runs import RunFolder
from tests.using.tiny import run_folder

TEXT = "".join(f"line {number} of a text that is long enough\n" for number in range(400))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def run(tmp_path: Path, corpus: Path) -> RunFolder:
    return run_folder(tmp_path / "run", corpus=str(corpus))


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the token files that are made."""
    made: list[str] = []
    write = preparation.write_token_file

    def noting(path: Path, *args: Any) -> Any:
        made.append(path.name)
        return write(path, *args)

    monkeypatch.setattr(preparation, "write_token_file", noting)
    return made


def command(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"split": "valid", "max_tokens": 300},
        {"protocol": "transformer-xl", "batch_size": 3, "block_length": 40},
        {"protocol": "sha-rnn"},
    ],
)
def test_the_same_numbers_as_the_command(
    run: RunFolder, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    score = longspan.evaluate(run.path, **settings)
    options = [
        word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    found = command(capsys, str(run.path), *options)
    assert found.items() >= score.figures().items()
    assert isinstance(score, Score)
    assert score.bits_per_byte == found["bits_per_byte"]
    assert longspan.evaluate(longspan.load(run.path), **settings) == score


def test_other_text_and_token_ids(run: RunFolder, tmp_path: Path, corpus: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(TEXT[::-1], encoding="utf-8")
    on_file = longspan.evaluate(run.path, other, "valid")
    assert on_file != longspan.evaluate(run.path, split="valid")
    ids = np.array(prepare(DataConfig(corpus=str(other))).splits["valid"].tokens)
    assert longspan.evaluate(run.path, ids) == on_file
    assert longspan.evaluate(run.path, {"valid": ids}, "valid") == on_file
    with pytest.raises(UserError, match="data has no 'test' split"):
        longspan.evaluate(run.path, {"valid": ids})


def test_tokens_without_text_have_no_bytes(tmp_path: Path) -> None:
    from longspan.data.tokenizers.number import NumberTokenizer

    run = run_folder(tmp_path / "numbers", NumberTokenizer(7))
    score = longspan.evaluate(run.path, np.arange(60) % 7)
    assert (score.tokens, score.bytes, score.words) == (59, None, None)
    assert math.isnan(score.bits_per_byte)
    assert score.perplexity > 1
    assert (
        not {"bits_per_byte", "bits_per_character", "perplexity_per_word", "bytes"} & score.figures().keys()
    )


def test_the_token_files_of_the_training_are_used(
    run: RunFolder, corpus: Path, tokenized: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(run.config.data)
    assert tokenized == ["train.tokens", "valid.tokens", "test.tokens"]
    command(capsys, str(run.path))
    longspan.evaluate(run.path)
    longspan.evaluate(run.path, corpus, "valid")
    assert len(tokenized) == 3


def test_other_text_is_tokenized_once(
    run: RunFolder, tmp_path: Path, tokenized: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(TEXT * 2, encoding="utf-8")
    first = command(capsys, str(run.path), "--data", str(other))
    assert tokenized == ["whole.tokens"]
    assert command(capsys, str(run.path), "--data", str(other)) == first
    longspan.evaluate(run.path, other)
    assert tokenized == ["whole.tokens"]
    longspan.evaluate(run.path, other, "valid")
    assert tokenized == ["whole.tokens", "valid.tokens"]
    other.write_text(TEXT * 2 + "one more line\n", encoding="utf-8")
    assert longspan.evaluate(run.path, other).nats != first["nats"]
    assert tokenized == ["whole.tokens", "valid.tokens", "whole.tokens"]


def test_another_vocabulary_is_not_taken_for_the_models(
    tmp_path: Path, corpus: Path, tokenized: list[str]
) -> None:
    """The same corpus and settings, prepared now, may have another vocabulary than the run."""
    from longspan.data.tokenizers.character import CharacterTokenizer

    letters = "".join(sorted(set(TEXT), reverse=True))
    run = run_folder(tmp_path / "run", CharacterTokenizer(letters), corpus=str(corpus))
    prepared = prepare(run.config.data)
    assert prepared.tokenizer.settings() != run.tokenizer().settings()
    before = len(tokenized)
    score = longspan.evaluate(run.path)
    assert len(tokenized) == before + 1
    text = bytes(prepared.tokenizer.decode(prepared.splits["test"].tokens), "utf-8").decode()
    assert longspan.evaluate(run.path, run.tokenizer().encode(text)).nats == score.nats


def test_token_files_that_are_damaged_are_made_again(
    run: RunFolder, tmp_path: Path, tokenized: list[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(TEXT * 2, encoding="utf-8")
    first = longspan.evaluate(run.path, other)
    (file,) = (home() / "tokens").rglob("whole.tokens")
    file.write_bytes(file.read_bytes()[:-1])
    assert longspan.evaluate(run.path, other) == first
    assert tokenized == ["whole.tokens"] * 2


def test_text_that_has_changed_is_a_warning(run: RunFolder, corpus: Path) -> None:
    corpus.write_text("one more line\n" + TEXT, encoding="utf-8")
    with pytest.warns(UserWarning, match="may hold text that the model was trained on"):
        longspan.evaluate(run.path)


def test_a_run_without_a_corpus_needs_data(run: RunFolder, tmp_path: Path) -> None:
    config = dataclasses.replace(run.config, data=DataConfig(corpus=""))
    empty = RunFolder.create(tmp_path / "none", config, ByteTokenizer(), "")
    run.checkpoint("best").rename(empty.checkpoint("best"))
    with pytest.raises(UserError, match="has no corpus: give data"):
        longspan.evaluate(empty.path)
    assert main(["eval", str(empty.path)]) == 1


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"protocol": "mine"}, "'evaluation.protocol' must be one of every-token"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"split": "tset"}, "there is no split 'tset'; did you mean 'test'"),
        ({"data": np.array([300, 1])}, "data has the token 300"),
    ],
)
def test_mistakes(run: RunFolder, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        longspan.evaluate(run.path, **settings)


def test_a_file_is_scored_whole_and_its_parts_by_split(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(TEXT, encoding="utf-8")
    whole = command(capsys, str(run.path), "--data", str(other))
    assert (whole["corpus"], whole["split"]) == (str(other), "whole")
    assert (whole["tokens"], whole["bytes"]) == (len(TEXT) - 1, len(TEXT) - 1)
    assert longspan.evaluate(run.path, other).nats == whole["nats"]
    assert longspan.evaluate(run.path, run.tokenizer().encode(TEXT)).nats == whole["nats"]
    parts = [command(capsys, str(run.path), "--data", str(other), "--split", split) for split in SPLITS]
    assert sum(part["tokens"] + 1 for part in parts) == len(TEXT)
    assert [part["split"] for part in parts] == list(SPLITS)
    for part in parts:
        assert longspan.evaluate(run.path, other, part["split"]).nats == part["nats"]
    assert command(capsys, str(run.path))["split"] == "test"  # the run's own corpus


def test_the_output_says_what_was_scored(
    run: RunFolder, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def title(*words: str) -> str:
        assert main(["eval", str(run.path), "--max-tokens", "20", *words]) == 0
        return capsys.readouterr().out.splitlines()[0]

    begin = f"{run.path} (best checkpoint) on"
    folder = tmp_path / "folder"
    folder.mkdir()
    for split in SPLITS:
        (folder / f"{split}.txt").write_text(TEXT)
    other = folder / "test.txt"
    assert title() == f"{begin} the test split of {corpus}"
    assert title("--data", str(other)) == f"{begin} all of {other}"
    assert title("--data", str(other), "--split", "valid") == f"{begin} the valid split of {other}"
    assert title("--data", str(folder)) == f"{begin} the test split of {folder}"
    assert main(["eval", str(run.path), "--data", str(folder), "--split", "whole"]) == 1
    assert f"{folder} is not a text file" in capsys.readouterr().err


def test_the_training_file_as_a_whole_is_a_warning(
    run: RunFolder, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        assert main(["eval", str(run.path), "--max-tokens", "20", *words]) == 0
        return capsys.readouterr().err

    assert "was trained on a part of" in said("--data", str(corpus))
    assert "was trained on a part of" not in said("--data", str(corpus), "--split", "test")
    assert "was trained on a part of" not in said()


@pytest.mark.parametrize("text", ["ab", "x\ny\n"])
def test_a_file_too_short_to_split_can_be_scored(run: RunFolder, tmp_path: Path, text: str) -> None:
    other = tmp_path / "short.txt"
    other.write_text(text)
    assert longspan.evaluate(run.path, other).tokens == len(text) - 1
    other.write_text("")
    with pytest.raises(UserError, match=r"short\.txt is empty: there is no text to score"):
        longspan.evaluate(run.path, other)


def test_memory_and_positions_from_both_sides(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    plain = command(capsys, str(run.path), "--max-tokens", "300", "--block-length", "20")
    options = ("--max-tokens", "300", "--block-length", "20", "--no-memory", "--by-position")
    found = command(capsys, str(run.path), *options)
    score = longspan.evaluate(run.path, max_tokens=300, block_length=20, memory=False, by_position=True)
    assert found.items() >= score.figures().items()
    assert found["memory"] is False
    assert not {"memory", "by_position"} & plain.keys()
    assert found["nats"] != plain["nats"]
    assert [entry["position"] for entry in found["by_position"]] == list(range(1, 21))
    assert sum(entry["nats"] for entry in found["by_position"]) == found["nats"]
    assert sum(entry["tokens"] for entry in found["by_position"]) == found["tokens"]
    assert main(["eval", str(run.path), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("memory ")).endswith("starts from an empty state")
    table = lines[lines.index("") + 1 :]
    table = table[table.index("") + 2 :]
    positions = ["1", "2", "3 to 4", "5 to 8", "9 to 16", "17 to 20"]
    assert [line[:22].strip() for line in table] == positions
    assert sum(int(line[22:36].replace(",", "")) for line in table) == found["tokens"]
    assert table[0].endswith(f"{found['by_position'][0]['loss']:.4f}")
