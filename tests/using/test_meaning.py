"""Text that the vocabulary does not know, weights and figures that are not finite: said, never silent."""

from __future__ import annotations

import io
import json
import math
import sys
import warnings
from pathlib import Path

import pytest
import torch

from longspan.cli import main
from longspan.data.tokenizers.word import WordTokenizer
from longspan.errors import UserError
from longspan.generation import sample
from longspan.json_text import to_json
from longspan.language_model import load
from longspan.runs import RunFolder, checkpoint
from longspan.training.journal import Journal
from tests.using.tiny import run_folder

WORDS = ["the", "cat", "sat", "<eos>", "<unk>"]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / "text.txt").write_text("the cat sat\n" * 300)
    return run_folder(tmp_path / "run", WordTokenizer(WORDS), corpus=str(tmp_path / "text.txt"))


def strict(text: str) -> dict:
    """JSON without the words NaN and Infinity, which Python would accept."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def spoil(run: RunFolder, value: float) -> None:
    saved = checkpoint.load(run.checkpoint("best"))
    name = next(name for name in saved.tensors if name.startswith("model."))
    saved.tensors[name].view(-1)[0] = value
    for which in ("best", "last"):
        checkpoint.save(run.checkpoint(which), saved.tensors, saved.facts)


def test_a_prompt_with_unknown_words_is_shown_as_it_is_read(run, capsys):
    assert main(["generate", str(run.path), "--prompt", "the dog sat", "--tokens", "2"]) == 0
    err = capsys.readouterr().err
    assert "warning: 1 of the 3 tokens of the prompt are not in the vocabulary: " in err
    assert "it is read as 'the <unk> sat'" in err


def test_every_prompt_of_a_file_and_every_line_is_checked(run, tmp_path, capsys, monkeypatch):
    lines = "the dog sat\nthe cat sat\nfox sat\n"
    (tmp_path / "prompts.txt").write_text(lines)
    command = ["generate", str(run.path), "--tokens", "2"]
    for words in (["--prompts", str(tmp_path / "prompts.txt")], ["--interactive"]):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert main([*command, *words]) == 0
        warned = capsys.readouterr().err.splitlines()
        assert [line.rpartition("read as ")[2] for line in warned] == ["'the <unk> sat'", "'<unk> sat'"]
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main([*command, "--interactive", "--prompt", "the dog sat"]) == 0
    assert "it is read as 'the <unk> sat'" in capsys.readouterr().err


def test_known_prompts_and_unk_itself_are_no_reason_to_warn(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(run.path).generate("the <unk> sat", tokens=2)
        load(run.path).generate(tokens=2)


@pytest.mark.parametrize(("text", "warned"), [("dog " * 30 + "cat " * 10, True), ("cat sat\n" * 30, False)])
def test_eval_says_when_a_score_says_little(run, tmp_path, capsys, text, warned):
    (tmp_path / "other.txt").write_text(text)
    command = ["eval", str(run.path), "--data", str(tmp_path / "other.txt"), "--batch-size", "1"]
    assert main([*command, "--json"]) == 0
    figures = strict(capsys.readouterr().out)
    assert figures["unknown_share"] == figures["unknown"] / figures["tokens"]
    assert bool(figures["warnings"]) == warned
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert ("are unknown to the vocabulary: the score says little about this text" in shown) == warned


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "command", [["eval", "{}"], ["eval", "{}", "--json"], ["generate", "{}"], ["attention", "{}"]]
)
def test_weights_that_are_not_finite_are_one_line(run, capsys, value, command):
    spoil(run, value)
    assert main([word.format(run.path) for word in command]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "best.safetensors are not finite ('" in err


def test_spans_that_are_not_finite_are_one_line(run, capsys):
    with run.spans.open("a") as file:
        file.write('{"step": 40, "limit": 12, "spans": [[4, NaN], [4, 4]]}\n')
    assert main(["spans", str(run.path)]) == 1
    assert "line 4 of" in (err := capsys.readouterr().err)
    assert "has spans that are not finite" in err


def test_a_loss_that_is_not_finite_is_null_and_said(run, capsys, monkeypatch):
    module = sys.modules["longspan.evaluation.evaluate"]  # the package has a function of that name
    monkeypatch.setattr(module, "sum_of_nats", lambda *args: ([math.nan], [1]))
    assert main(["eval", str(run.path), "--json", "--batch-size", "1"]) == 0
    figures = strict(capsys.readouterr().out)
    assert figures["nats"] is None
    assert figures["warnings"] == ["the loss is not finite: the score means nothing"]


def test_json_has_no_words_for_what_is_not_finite(tmp_path):
    values = {"a": math.nan, "b": [1.5, math.inf, (-math.inf, 2)], "c": {"d": math.nan, "e": "NaN"}}
    assert strict(to_json(values)) == {"a": None, "b": [1.5, None, [None, 2]], "c": {"d": None, "e": "NaN"}}
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.write({"loss": math.nan, "step": 1})
    journal.close()
    assert strict((tmp_path / "metrics.jsonl").read_text()) == {"loss": None, "step": 1}


def test_probabilities_that_are_not_numbers_are_no_traceback():
    with pytest.raises(UserError, match="probabilities are not numbers"):
        sample(torch.tensor([[0.0, math.nan]]))
