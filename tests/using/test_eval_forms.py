"""`longspan eval --context-curve` and `--dynamic`, and the same from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import longspan
from longspan.cli import main
from longspan.errors import UserError
from longspan.evaluation import dynamic
from longspan.runs import RunFolder
from tests.models.test_contract import GPT
from tests.using.tiny import run_folder

TEXT = "".join(f"line {number} of a text that is long enough\n" for number in range(400))
CURVE = ("--context-curve", "--contexts", "4,32,9000", "--curve-tokens", "60", "--max-tokens", "400")
DYNAMIC = ("--max-tokens", "60", "--block-length", "20", "--dynamic")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return run_folder(tmp_path / "run", corpus=str(tmp_path / "text.txt"))


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(["eval", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_how_the_text_is_read(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, raw = tmp_path / "texts.jsonl", tmp_path / "raw.bin"
    lines.write_text('{"body": "some words"}\n{"body": "more"}\n', encoding="utf-8")
    raw.write_bytes(bytes(range(256)))
    found = json.loads(shown(capsys, run.path, "--data", lines, "--data.field", "body", "--json"))
    assert found["bytes"] == len("some words\nmore\n") - 1
    found = json.loads(shown(capsys, run.path, "--data", raw, "--binary", "--json"))
    assert found["bytes"] == 255


def test_a_score_that_is_not_finite_has_all_keys(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(capsys, run.path, *DYNAMIC, "sgd", "--dynamic-rate", "1e30", "--json"))
    assert found["dynamic"].keys() == found["static"].keys()
    assert found["dynamic"]["bits_per_byte"] is None


def test_rms_says_why_it_needs_the_training_text(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "text.txt").unlink()
    assert main(["eval", str(run.path), "--data", str(tmp_path / "other.txt"), *DYNAMIC, "rms"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("longspan: --dynamic rms needs the training text: there is no file or folder")


def test_the_training_text_is_read_as_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options of --data are not for it."""
    lines, other = tmp_path / "train.jsonl", tmp_path / "other.jsonl"
    lines.write_text("".join(json.dumps({"text": TEXT[:40], "body": "x"}) + "\n" for _ in range(300)))
    other.write_text(json.dumps({"body": TEXT}) + "\n", encoding="utf-8")
    run = run_folder(tmp_path / "run", corpus=str(lines))
    words = [run.path, *DYNAMIC, "rms", "--dynamic-rate", "0.001", "--json"]
    (tmp_path / "body.txt").write_text(TEXT, encoding="utf-8")
    expected = json.loads(shown(capsys, *words, "--data", tmp_path / "body.txt"))
    found = json.loads(shown(capsys, *words, "--data", other, "--data.field", "body"))
    assert found["dynamic"]["nats"] == expected["dynamic"]["nats"]


def test_contexts_that_a_model_does_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    run = run_folder(tmp_path / "run", corpus=str(tmp_path / "text.txt"), model=GPT)
    text = shown(capsys, run.path, "--context-curve", "--contexts", "8,10,9000", "--curve-tokens", "60")
    assert "left out              10, 9,000: the model begins a new context every 10 tokens" in text
    assert [line.split()[0] for line in text.splitlines()[3:5]] == ["8", "all"]


def test_the_curve_as_text_json_figure_and_from_python(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "curve.png"
    text = shown(capsys, run.path, *CURVE, "--figure", figure)
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert (
        "left out              9,000: more than twice as many tokens are needed: a larger --max-tokens"
        in text
    )
    assert "read                  the first 401 of " in text
    assert f"figure: {figure}" in text
    found: dict[str, Any] = json.loads(shown(capsys, run.path, *CURVE, "--json"))
    points = found["context_curve"]
    assert [point["context"] for point in points] == [4, 32, None]
    assert [(point["least"], point["most"]) for point in points[:2]] == [(4, 4), (32, 39)]
    assert (found["tokens"], found["bytes"], found["left_out"]) == (60, 60, [9000])
    for name, point in zip(("4", "32", "all"), points, strict=True):
        line = next(line for line in text.splitlines() if line.startswith(f"{name} "))
        assert f"{point['bits_per_byte']:.4f}" in line
    curve = longspan.context_curve(run.path, contexts=(4, 32, 9000), scored_tokens=60, max_tokens=400)
    assert found.items() >= curve.figures().items()
    unscored = longspan.context_curve(run.path, np.arange(99), contexts=[3])
    assert unscored.points[0].context == 3


@pytest.mark.parametrize("rule", ["sgd", "rms"])
def test_dynamic_evaluation_beside_the_static_one(
    run: RunFolder, rule: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic, "STATISTICS_BLOCKS", 4)
    found = json.loads(shown(capsys, run.path, *DYNAMIC, rule, "--dynamic-rate", "0.01", "--json"))
    assert found["steps"] == 3
    assert found["static"]["batch_size"] == 1
    assert found["static"]["nats"] != found["dynamic"]["nats"]
    plain = json.loads(
        shown(capsys, run.path, "--max-tokens", 60, "--block-length", 20, "--batch-size", 1, "--json")
    )
    assert found["static"]["nats"] == plain["nats"]
    assert found["static_seconds"] > 0 < found["dynamic_seconds"]
    text = shown(capsys, run.path, *DYNAMIC, rule, "--dynamic-rate", "0.01", "--batch-size", 2)
    assert f"{rule}, rate 0.01, decay" in text
    assert "every-token, 2 lanes, blocks of 20" in text
    assert "microseconds per byte" in text
    assert "tokens skipped" in text
    assert "are beyond the limit)" in text
    assert "no step came before" not in text
    text = shown(capsys, run.path, "--max-tokens", 60, "--block-length", 60, "--dynamic", rule)
    assert "no step came before a scored token: use a smaller --block-length or --batch-size" in text
    again = longspan.dynamic_evaluation(run.path, rule=rule, rate=0.01, max_tokens=60, block_length=20)
    assert again.dynamic.nats == found["dynamic"]["nats"]


def test_rate_zero_from_python_and_training_tokens(run: RunFolder) -> None:
    ids = np.random.default_rng(0).integers(32, 64, 300)
    score = longspan.dynamic_evaluation(run.path, ids, training=ids, rate=0.0, max_tokens=50, block_length=20)
    assert score.dynamic == score.static
    other = longspan.dynamic_evaluation(
        run.path, {"test": ids}, training={"train": ids}, rate=0.0, max_tokens=50, block_length=20
    )
    assert other.static == score.static


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda run: longspan.context_curve(run, contexts=[0]), "whole numbers, .* each at least 1"),
        (lambda run: longspan.context_curve(run, contexts="16,32"), "contexts must be a list"),
        (lambda run: longspan.context_curve(run, contexts=16), "contexts must be a list"),
        (lambda run: longspan.context_curve(run, contexts=[1.5]), "contexts must be a list"),
        (lambda run: longspan.dynamic_evaluation(run, rate="0.1"), "rate must be a number"),
        (
            lambda run: longspan.context_curve(run, contexts=[5000], max_tokens=99),
            "10,000 tokens that can be scored, not 99: read",
        ),
        (lambda run: longspan.dynamic_evaluation(run, rule="adam"), "there is no rule 'adam'"),
        (lambda run: longspan.dynamic_evaluation(run, decay=2), "decay one between 0 and 1"),
        (lambda run: longspan.dynamic_evaluation(run, batch_size=0), "batch_size"),
    ],
)
def test_mistakes(run: RunFolder, call: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        call(run.path)
