"""Samples, prompts from files, stop strings, log-probabilities, repetition penalty, JSON, taking turns."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.cli import main
from longspan.language_model import LoadedModel, load
from longspan.reading import read
from longspan.stop_strings import StopStrings
from tests.using.test_cli import complaint, misuse
from tests.using.tiny import run_folder


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(run_folder(tmp_path / "run").path)


@pytest.fixture
def lm(run: str) -> LoadedModel:
    return load(run)


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["generate", *words, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_samples_have_seeds_of_their_own(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, run, "--prompt", "ab", "--tokens", "12", "--samples", "3", "--seed", "5")
    assert [line["seed"] for line in found] == [5, 6, 7]
    assert len({line["text"] for line in found}) == 3
    assert lines(capsys, run, "--prompt", "ab", "--tokens", "12", "--seed", "6") == [found[1]]
    assert main(["generate", run, "--prompt", "ab", "--tokens", "12", "--seed", "6"]) == 0
    assert capsys.readouterr().out == "ab" + found[1]["text"] + "\n"


def test_several_texts_have_headers(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", run, "--samples", "2", "--tokens", "1"]) == 0
    shown = capsys.readouterr().out
    assert "==> prompt 1 of 1, sample 2 of 2 <==\n" in shown


def test_prompts_from_a_file(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"one\r\n\ntwo words\n")
    words = [run, "--tokens", "3", "--seed", "1", "--prompts"]
    found = lines(capsys, *words, str(file))
    assert [line["prompt"] for line in found] == ["one", "", "two words"]
    alone = lines(capsys, run, "--tokens", "3", "--seed", "1", "--prompt", "two words")
    assert alone == [found[2]]
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo words"))
    assert lines(capsys, *words, "-") == found
    objects = tmp_path / "prompts.jsonl"
    objects.write_text('"one"\n{"prompt": ""}\n{"prompt": "two words", "more": 1}\n')
    assert lines(capsys, *words, str(objects)) == found


def test_stop_strings_are_held_back_until_they_are_sure() -> None:
    stop = StopStrings(["END", "\n\n"])
    assert [stop.push(piece) for piece in ("a E", "N", "e\n", "x\n", "\nmore")] == [
        "a ",
        "",
        "ENe",
        "\nx",
        "",
    ]
    assert stop.found == "\n\n"
    cut = StopStrings(["END"])
    assert (cut.push("xEN"), cut.flush(), cut.found) == ("x", "EN", None)
    first = StopStrings(["cd", "bc"])
    assert (first.push("abcd"), first.found) == ("a", "bc")


def test_a_stop_string_ends_the_text(run: str, lm: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    whole = lm.generate("a", tokens=40, seed=3)
    stop = whole[20:22]
    end = whole.index(stop)
    text = lm.generate("a", tokens=40, seed=3, stop=["not in the text", stop])
    assert (text, text.stop) == (whole[:end], stop)
    assert len(text.ids) < len(whole.ids) == 40
    assert "".join(lm.stream("a", tokens=40, seed=3, stop=[stop])) == text
    (line,) = lines(capsys, run, "--prompt", "a", "--tokens", "40", "--seed", "3", "--stop", stop)
    assert (line["text"], line["stop"]) == (text, stop)


def test_log_probs_are_those_of_the_model(
    run: str, lm: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    text = lm.generate("abc", tokens=9, seed=2, temperature=0.5, top_k=5)
    start = lm.read("abc")
    expected = []
    for token in text.ids:
        expected.append(float(lm.model.head.log_probs(start.hidden_D[None, None])[0, 0, token].detach()))
        start = read(lm.model, [token], start)
    assert text.log_probs == pytest.approx(expected, abs=1e-5)
    options = ["--tokens", "9", "--seed", "2", "--temperature", "0.5", "--top-k", "5", "--log-probs"]
    (line,) = lines(capsys, run, "--prompt", "abc", *options)
    assert line["token_log_probs"] == list(text.log_probs)
    assert line["log_prob"] == pytest.approx(math.fsum(expected), abs=1e-4)
    assert main(["generate", run, "--prompt", "abc", *options]) == 0
    shown = capsys.readouterr().out.splitlines()[-9:]
    assert [float(row.split()[0]) for row in shown] == pytest.approx(expected, abs=1e-3)


def test_a_repetition_penalty_avoids_tokens_that_were_generated(lm: LoadedModel) -> None:
    greedy = lm.generate("a", tokens=30, temperature=0)
    penalised = lm.generate("a", tokens=30, temperature=0, repetition_penalty=1e6)
    assert len(set(greedy.ids)) < 30
    assert len(set(penalised.ids)) == 30
    assert penalised.ids[0] == greedy.ids[0]
    assert penalised.log_probs[0] == greedy.log_probs[0]
    with torch.no_grad():
        assert lm.generate("a", tokens=30, seed=1, repetition_penalty=1.0) == lm.generate(
            "a", tokens=30, seed=1
        )


def test_interactive_mode_keeps_the_state(
    run: str, lm: LoadedModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\n\nthird"))
    assert main(["generate", run, "--interactive", "--prompt", "so: ", "--tokens", "7", "--seed", "4"]) == 0
    shown = capsys.readouterr().out
    state, expected = lm.read("so: "), ""
    for turn, line in enumerate(("first", "\n", "third")):
        text = lm.generate(line, tokens=7, seed=4 + turn, state=state)
        state, expected = text.state, expected + text + "\n"
    assert shown == expected


def test_mistakes(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate = ["generate", run]
    assert "--samples must be" in misuse(capsys, *generate, "--samples", "0")
    assert "repetition penalty" in misuse(capsys, *generate, "--repetition-penalty", "0")
    assert "repetition penalty" in misuse(capsys, *generate, "--repetition-penalty", "nan")
    assert "none of them empty" in misuse(capsys, *generate, "--stop", "")
    assert "give one" in misuse(capsys, *generate, "--prompt", "a", "--prompts", "b")
    assert "leave one out" in misuse(capsys, *generate, "--interactive", "--json")
    assert "none.txt" in complaint(capsys, *generate, "--prompts", tmp_path / "none.txt")
    (tmp_path / "empty.txt").touch()
    assert "has no prompts" in complaint(capsys, *generate, "--prompts", tmp_path / "empty.txt")
    (tmp_path / "bad.jsonl").write_text('"a"\n{"text": "b"}\n')
    assert "bad.jsonl, line 2 has no text 'prompt'" in complaint(
        capsys, *generate, "--prompts", tmp_path / "bad.jsonl"
    )
