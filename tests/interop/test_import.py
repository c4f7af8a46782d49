"""`longspan import`, through `main`: a run that can be scored and writes on, or one line and nothing left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import longspan
from longspan.bench.spans import learned_spans
from longspan.cli import main
from longspan.config import TokenizerConfig
from longspan.interop import load_original
from longspan.runs import RunFolder, checkpoint
from tests.interop.checkpoints import Original

WORDS = " ".join(f"w{n}" for n in range(59))  # and <eos>: the 60 of the recorded models


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(f"{WORDS}\n" * 60, encoding="utf-8")
    return path


def arguments(tmp_path: Path, case: str, corpus: Path) -> list[str]:
    made = Original.of(case)
    file, config = made.save(tmp_path / "c.pt"), tmp_path / "config.json"
    config.write_text(json.dumps(made.options))
    words = ["import", file, "--kind", made.kind, "--data", corpus, "--config", config]
    return [str(word) for word in [*words, "--out", tmp_path / "run"]]


@pytest.mark.parametrize("case", ["fixed_span", "all_attention", "sha_rnn", "txl_basic"])
def test_an_imported_run_is_scored_and_writes_on(tmp_path, corpus, capsys, case):
    assert main(arguments(tmp_path, case, corpus)) == 0
    run, made = str(tmp_path / "run"), Original.of(case)
    expected = load_original(tmp_path / "c.pt", kind=made.kind, config=made.options)
    found = longspan.load(run, device="cpu")
    assert found.config.data.tokenizer.kind == found.config.evaluation.protocol == made.kind
    for name, tensor in expected.state_dict().items():
        assert tensor.equal(found.model.state_dict()[name])
    capsys.readouterr()
    assert main(["eval", run, "--device", "cpu", "--block-length", "16", "--batch-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] > 90
    assert main(["generate", run, "--tokens", "5", "--device", "cpu"]) == 0


@pytest.mark.parametrize("case", ["fairseq_adaptive_span_layer", "hf_transfo_xl_untie_r", "sha_rnn_split"])
def test_without_a_corpus_tokens_are_numbers(tmp_path, capsys, case):
    made, run = Original.of(case), str(tmp_path / "run")
    words = arguments(tmp_path, case, tmp_path)
    place = words.index("--data")
    assert main(words[:place] + words[place + 2 :]) == 0
    found = longspan.load(run, device="cpu")
    expected = load_original(tmp_path / "c.pt", kind=made.kind, config=made.options)
    assert found.tokenizer.vocabulary_size == expected.vocabulary_size
    for name, tensor in expected.state_dict().items():
        assert tensor.equal(found.model.state_dict()[name])
    capsys.readouterr()
    assert main(["generate", run, "--prompt", "3 1 4", "--tokens", "5", "--device", "cpu"]) == 0
    written = [int(number) for number in capsys.readouterr().out.split()]
    assert written[:3] == [3, 1, 4]
    assert len(written) == 3 + 5
    assert max(written) < expected.vocabulary_size
    assert main(["eval", run, "--device", "cpu"]) == 1
    assert "give the text with --data" in capsys.readouterr().err
    (tmp_path / "numbers.txt").write_text("3 1 4 15 9\n2 6 5\n" * 200)
    options = ["--protocol", "every-token", "--block-length", "16", "--device", "cpu", "--json"]
    assert main(["eval", run, "--data", str(tmp_path / "numbers.txt"), *options]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] > 60


def test_a_run_of_fairseqs_reads_a_corpus_of_numbers(tmp_path, corpus, capsys):
    corpus.write_text("3 1 4 15 9\n2 6 5\n" * 200)
    assert main(arguments(tmp_path, "fairseq_adaptive_span", corpus)) == 0
    config = RunFolder.open(tmp_path / "run").config
    assert config.data.tokenizer == TokenizerConfig(kind="number", vocabulary_size=60)
    assert config.evaluation.protocol == "every-token"
    assert main(["eval", str(tmp_path / "run"), "--device", "cpu", "--block-length", "16"]) == 0
    corpus.write_text("words and 5\n" * 500)
    (tmp_path / "run").rename(tmp_path / "first")
    capsys.readouterr()
    assert main(arguments(tmp_path, "fairseq_adaptive_span", corpus)) == 1
    assert "must be token numbers" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_words_are_numbered_as_they_were_for_the_original(tmp_path, corpus):
    assert main(arguments(tmp_path, "fixed_span", corpus)) == 0
    run = RunFolder.open(tmp_path / "run")
    assert run.config.data.tokenizer == TokenizerConfig(kind="adaptive-span", order="first-seen")
    assert run.tokenizer().encode("w0 w1").tolist() == [0, 1]


@pytest.mark.parametrize("case", ["adaptive_span_trim", "fairseq_adaptive_span_layer"])
def test_learned_spans_of_an_imported_run_are_shown(tmp_path, capsys, case):
    words = arguments(tmp_path, case, tmp_path)
    place = words.index("--data")
    assert main(words[:place] + words[place + 2 :]) == 0
    run = tmp_path / "run"
    model = longspan.load(run, device="cpu").model
    limit = max(span.limit for span in learned_spans(model))
    (line,) = (run / "spans.jsonl").read_text().splitlines()
    expected = {"step": 0, "limit": limit, "spans": model.diagnostics()["spans_LH"].tolist()}
    assert json.loads(line) == expected
    capsys.readouterr()
    assert main(["spans", str(run)]) == 0
    assert "Learned spans of run as it was imported, in tokens" in capsys.readouterr().out
    assert (run / "spans.png").stat().st_size > 10_000


def test_without_learned_spans_there_are_none_to_show(tmp_path, corpus, capsys):
    assert main(arguments(tmp_path, "fixed_span", corpus)) == 0
    assert not (tmp_path / "run" / "spans.jsonl").exists()
    assert main(["spans", str(tmp_path / "run")]) == 1
    assert "has no spans to show" in capsys.readouterr().err


def test_another_corpus_is_refused_and_leaves_nothing(tmp_path, corpus, capsys):
    corpus.write_text("three words only\n" * 500)
    assert main(arguments(tmp_path, "fixed_span", corpus)) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "a vocabulary of 60" in message
    assert "has 4" in message
    assert not (tmp_path / "run").exists()


def test_weights_that_cannot_be_written_leave_no_run(tmp_path, corpus, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    assert main(arguments(tmp_path, "fixed_span", corpus)) == 1
    assert "No space left" in capsys.readouterr().err
    assert not [entry for entry in tmp_path.iterdir() if "run" in entry.name]


def test_a_folder_that_is_there_stays_as_it_is(tmp_path, corpus, capsys):
    (tmp_path / "run").mkdir()
    assert main(arguments(tmp_path, "fixed_span", corpus)) == 1
    assert "exists already" in capsys.readouterr().err
    assert not list((tmp_path / "run").iterdir())


def test_an_imported_run_has_nothing_to_train(tmp_path, corpus, capsys):
    assert main(arguments(tmp_path, "fixed_span", corpus)) == 0
    weights = (tmp_path / "run/checkpoints/best.safetensors").read_bytes()
    assert main(["train", "--resume", str(tmp_path / "run")]) == 1
    assert "has no [[stage]]" in capsys.readouterr().err
    assert (tmp_path / "run/checkpoints/best.safetensors").read_bytes() == weights
