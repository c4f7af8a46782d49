"""The modern architecture from a file: trained, stopped, gone on with, its spans drawn, text written."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from longspan.cli import main
from longspan.config import RunConfig, schema
from longspan.models.stack import Stack
from longspan.runs import RunFolder
from longspan.training import Interrupted, resume, train

from .runs import Signals, metrics, outcome

GPU = torch.cuda.is_available()
CONFIG = """
name = "small"

[data]
corpus = "{text}"

[model]
architecture = "modern"
num_layers = 2
width = 16
num_heads = 2
inner_width = 32
memory = "keys-values"
feed_forward = "swiglu"
ngrams = [2, 3]
ngram_rows = 300
ngram_dropout = 0.4
repeat_dropout = 0.3
tied = true
softcap = 15.0

[model.span]
limit = 48
ramp = 4
limit_shortest = 8
start = 0.6
penalty = 1e-3
penalty_from = 4
penalty_full = 12

[training]
batch_size = 4
block_length = 32
segment_length = 96
device = "cpu"
log_every = 5
evaluate_every = 8
checkpoint_every = 6

[[stage]]
steps = 20
optimizer = "muon"
learning_rate = 0.02
adamw_learning_rate = 0.01
schedule = "trapezoid"
warmup_steps = 2
cooldown = 0.4

[evaluation]
max_tokens = 200
max_tokens_final = 200
"""


@pytest.fixture
def toml(tmp_path: Path, text: Path) -> Path:
    """Of a text that is read twice: the split for training has 12 blocks of 4 x 32."""
    path, short = tmp_path / "modern.toml", tmp_path / "text.txt"
    short.write_bytes(text.read_bytes()[:2000])
    path.write_text(CONFIG.format(text=short))
    return path


def test_it_trains_from_a_file(tmp_path: Path, toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", str(toml), "--out", str(run)]) == 0
    losses = [line["loss"] for line in metrics(run) if line["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.5
    assert main(["spans", str(run)]) == 0
    assert main(["generate", str(run), "--prompt", "the cat", "--tokens", "60"]) == 0
    assert main(["eval", str(run)]) == 0
    assert len(capsys.readouterr().out) > 60

    frozen = tmp_path / "frozen"
    assert main(["spans", str(run), "--freeze", str(frozen)]) == 0
    assert "longspan eval" in capsys.readouterr().out
    span = RunFolder.open(frozen).config.model.span
    assert span.kind == "fixed"
    assert [len(windows) for windows in span.windows] == [2, 2]
    scores = []
    for folder in (run, frozen):
        assert main(["eval", str(folder), "--json"]) == 0
        scores.append(json.loads(capsys.readouterr().out)["bits_per_byte"])
    assert scores[0] == pytest.approx(scores[1], rel=0.05)  # soft edges have become hard ones
    assert main(["spans", str(run), "--freeze", str(frozen)]) == 1
    assert "exists already" in capsys.readouterr().err


def test_the_model_hears_how_often_the_text_was_read(
    tmp_path: Path, toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(Stack, "begin_epoch", lambda self, number: told.append(number))
    config = RunConfig.from_toml(toml.read_bytes(), str(toml))
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", reporter=Signals("train step 15 ", signal.SIGINT))
    resume(tmp_path / "run")
    assert told == [0] * 12 + [1] * 8


# What flagship has and the small run has not.
PARTS = {
    "model.feed_forward": "squared-relu",
    "model.rope_fraction": "0.5",
    "model.value_embeddings": "true",
    "model.key_offset": "true",
    "model.token_shift": "true",
    "model.residual_scalars": "true",
    "model.qk_gain": "1.44",
    "model.tied": "false",
    "model.span.growth": "[0.25, 0.5, 1.0]",
    "stage.0.optimizer": "normuon",
    "stage.0.cautious_decay": "true",
    "stage.0.weight_decay": "0.1",
    "stage.0.momentum_warmup_steps": "10",
    "stage.0.multi_token": "[0.5, 0.25]",
    "stage.0.multi_token_until": "0.9",
}


@pytest.mark.parametrize("parts", [{}, PARTS], ids=["small", "parts of flagship"])
@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("cpu", "float32"),
        *(
            pytest.param("cuda", precision, marks=pytest.mark.skipif(not GPU, reason="needs a GPU"))
            for precision in ("float32", "bf16")
        ),
    ],
)
def test_it_goes_on_as_if_it_had_not_been_stopped(
    tmp_path: Path, toml: Path, device: str, precision: str, parts: dict[str, str]
) -> None:
    table = schema.parse_toml(toml.read_bytes(), str(toml))
    table["training"] |= {"device": device, "precision": precision, "deterministic": device == "cuda"}
    for name, value in parts.items():
        schema.override(table, name, value)
    config = schema.read(RunConfig, table)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(config, whole)
    with pytest.raises(Interrupted):
        train(config, stopped, reporter=Signals("train step 15 ", signal.SIGINT))
    resume(stopped)
    assert metrics(stopped)[-1]["valid"] == metrics(whole)[-1]["valid"]  # a failure of this is easy to read
    assert outcome(stopped) == outcome(whole)
