"""Spans over a text: in Python, as text, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import longspan
from longspan.cli import main
from longspan.config import RunConfig
from longspan.errors import UserError
from longspan.inspection import read_spans, spans_as_text
from longspan.layers.dynamic_span import DynamicSpan
from longspan.models import build
from longspan.runs import RunFolder, checkpoint
from tests.using.tiny import MODEL, run_folder

TEXT = "one two three, and then\n" * 3
DYNAMIC = dataclasses.replace(MODEL, span=dataclasses.replace(MODEL.span, kind="dynamic", limit=40))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run whose heads look further the later a letter is in the alphabet, nearly."""
    made = run_folder(tmp_path / "old")
    config: RunConfig = dataclasses.replace(made.config, model=DYNAMIC)
    torch.manual_seed(0)
    model = build(DYNAMIC, 256)
    for module in model.modules():
        if isinstance(module, DynamicSpan):
            torch.nn.init.normal_(module.direction_HD, std=0.5)
            module.last_2H.copy_(torch.tensor([[5.0, 7.0], [9.0, 40.0]]))
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    new = RunFolder.create(tmp_path / "run", config, made.tokenizer(), made.fingerprint)
    checkpoint.save(new.checkpoint("best"), tensors, {"step": 30})
    moment = {"step": 10, "limit": 40, "dynamic": True, "spans": [[5, 7], [5.5, 7]]}
    new.spans.write_text(json.dumps(moment) + "\n")
    return new


def test_spans_of_every_token_are_those_of_the_layers(run: RunFolder) -> None:
    lm = longspan.load(run.path, device="cpu")
    seen: list[torch.Tensor] = []
    for module in lm.model.modules():
        if isinstance(module, DynamicSpan):
            module.register_forward_hook(lambda _, __, spans_BHT: seen.append(spans_BHT[0]))
    spans_LHT = lm.token_spans(TEXT)
    assert spans_LHT.shape == (2, 2, len(TEXT))
    expected = (torch.stack(seen).ceil() + 4).clamp(max=40)
    torch.testing.assert_close(spans_LHT, expected.double())
    assert len(spans_LHT.unique()) > 10
    assert lm.spans() == [[5.0, 7.0], [5.0, 7.0]]


def test_the_state_counts_and_the_cut_into_blocks_does_not(run: RunFolder, monkeypatch) -> None:
    lm = longspan.load(run.path, device="cpu")
    whole = lm.token_spans(TEXT)
    later = lm.token_spans(TEXT[30:], lm.read(TEXT[:30]))
    torch.testing.assert_close(later, whole[..., 30:])
    monkeypatch.setattr("longspan.reading.READ_BLOCK", 7)
    torch.testing.assert_close(lm.token_spans(TEXT), whole)


def test_learned_spans_are_the_same_at_every_token(tmp_path: Path) -> None:
    lm = longspan.load(run_folder(tmp_path / "run").path, device="cpu")
    spans_LHT = lm.token_spans("abc")
    assert spans_LHT.tolist() == [[[10.0] * 3] * 2] * 2
    assert lm.spans() == spans_LHT[..., 0].tolist()
    with pytest.raises(UserError, match="no spans to show"):
        lm.token_spans("")


def test_commands(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A $ costs é\n" * 30, encoding="utf-8")
    picture = tmp_path / "spans.png"
    given = ["spans", str(run.path), "--text", str(text), "--device", "cpu"]
    assert main([*given, "--out", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "'$'" in printed
    assert "more tokens: --json prints all" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["tokens"]) == len(found["spans"][1][1]) == 390
    assert (run.path / "text-spans.png").is_file()
    assert main(["spans", str(run.path)]) == 0
    assert "--text FILE" in capsys.readouterr().out
    assert main(["spans", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spans"] == [[5, 7], [5.5, 7]]


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--text", "missing.txt"], "cannot read missing.txt"),
        (["--text", "x", "--freeze", "y"], "give one of them"),
        (["--freeze", "y"], "no learned spans"),
    ],
)
def test_mistakes_are_one_line(run: RunFolder, more, complaint, capsys) -> None:
    assert main(["spans", str(run.path), *more]) != 0
    error = capsys.readouterr().err
    assert complaint in error
    assert "Traceback" not in error


def test_a_dynamic_history_says_so(run: RunFolder) -> None:
    assert spans_as_text(read_spans(run)).startswith("Mean dynamic spans of tiny after step 10")
