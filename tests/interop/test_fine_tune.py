"""Fine-tuning an original's checkpoint on other text, in the tokens of the original."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import longspan
from longspan.cli import main
from longspan.runs import RunFolder
from tests.interop.test_import import WORDS, arguments
from tests.training.runs import outcome

QUICK = {
    "stage.0.steps": 40,
    "stage.0.learning-rate": 0.01,
    "training.batch-size": 4,
    "training.block-length": 16,
    "training.device": "cpu",
    "evaluation.batch-size": 2,
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(f"{WORDS}\n" * 60, encoding="utf-8")
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Some of the words, in an order that gives them other numbers if they are counted again."""
    draw = random.Random(1)
    path = tmp_path / "other.txt"
    lines = (" ".join(f"w{draw.choice([50, 40, 30, 20, 10])}" for _ in range(9)) for _ in range(400))
    path.write_text("\n".join(lines) + "\n")
    return path


def fine_tune(out: Path, other: Path, **changes: object) -> list[str]:
    options = QUICK | changes
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return ["train", "--init", str(out.parent / "run"), "--data", str(other), "--out", str(out), *words]


@pytest.mark.parametrize(
    "case", ["fixed_span", "adaptive_span_trim", "all_attention", "sha_rnn", "txl_basic"]
)
def test_it_lowers_the_loss_there(
    case: str, tmp_path: Path, corpus: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path, case, corpus)) == 0
    before = longspan.evaluate(tmp_path / "run", str(other), batch_size=2, block_length=16, device="cpu")
    assert main(fine_tune(tmp_path / "tuned", other)) == 0
    after = longspan.evaluate(tmp_path / "tuned", batch_size=2, block_length=16, device="cpu")
    assert after.loss < before.loss - 0.5
    tuned = RunFolder.open(tmp_path / "tuned")
    assert (
        tuned.tokenizer().encode("w0 w7 w50").tolist()
        == RunFolder.open(tmp_path / "run").tokenizer().encode("w0 w7 w50").tolist()
    )
    assert tuned.config.model == RunFolder.open(tmp_path / "run").config.model


def test_it_resumes_exactly(tmp_path: Path, corpus: Path, other: Path) -> None:
    assert main(arguments(tmp_path, "adaptive_span_trim", corpus)) == 0
    often = {"training.log-every": 4, "training.checkpoint-every": 8}
    assert main(fine_tune(tmp_path / "whole", other, **often)) == 0
    stopped = longspan.train(
        data=other,
        out=tmp_path / "tuned",
        init=tmp_path / "run",
        callback=lambda line: line["step"] < 12,
        **{name.replace("-", "_"): value for name, value in (QUICK | often).items()},
    )
    assert stopped.final is None
    shutil.rmtree(tmp_path / "run")
    longspan.resume(tmp_path / "tuned")
    assert outcome(tmp_path / "tuned") == outcome(tmp_path / "whole")


def test_a_word_that_the_original_does_not_have_is_one_line(
    tmp_path: Path, corpus: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path, "fixed_span", corpus)) == 0
    other.write_text(other.read_text().replace("w10", "new"))
    capsys.readouterr()
    assert main(fine_tune(tmp_path / "tuned", other)) == 1
    *warnings, line = capsys.readouterr().err.splitlines()
    assert all(warning.startswith("longspan: warning: ") for warning in warnings)
    assert "other cannot be read with the vocabulary of the initial weights" in line
    assert "does not have the words 'new'" in line
    assert not (tmp_path / "tuned").exists()


def test_a_model_of_token_numbers_is_trained_on_numbers(tmp_path: Path, corpus: Path) -> None:
    words = arguments(tmp_path, "fixed_span", corpus)
    place = words.index("--data")
    assert main(words[:place] + words[place + 2 :]) == 0
    (tmp_path / "numbers.txt").write_text("3 1 4 15 9\n2 6 5\n" * 400)
    assert main(fine_tune(tmp_path / "tuned", tmp_path / "numbers.txt")) == 0
    tuned = RunFolder.open(tmp_path / "tuned")
    assert tuned.tokenizer().vocabulary_size == 60
    final = tuned.final()
    assert final is not None
    assert final["test"]["loss"] < 1
