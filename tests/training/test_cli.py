"""`longspan train` as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from longspan.cli import main
from longspan.cli.overrides import changed, split_overrides
from longspan.config import RunConfig
from longspan.config.reference import documented
from longspan.errors import UserError
from longspan.runs import RunFolder
from tests import forks

from .runs import metrics, small_table


@pytest.fixture
def recipe(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe file in the folder where the user stands."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(tomli_w.dumps(small_table(text)))
    return "small.toml"


class TestOverrides:
    def test_both_ways_of_writing(self) -> None:
        words = ["--model.num-layers", "4", "--stage.0.learning-rate=-1e-3", "--data.corpus", "a=b"]
        assert split_overrides(words) == [
            ("model.num-layers", "4"),
            ("stage.0.learning-rate", "-1e-3"),
            ("data.corpus", "a=b"),
        ]

    def test_they_change_the_recipe(self, text: Path) -> None:
        table = small_table(text)
        words = ["--model.num-layers", "3", "--stage.1.learning-rate=0.5"]
        config = changed(table, split_overrides(words), "small")
        assert config.model.num_layers == 3
        assert config.stage[1].learning_rate == 0.5

    @pytest.mark.parametrize("words", [["--model.width"], ["--model.width", "--model.num-layers", "2"]])
    def test_a_missing_value(self, words: list[str]) -> None:
        with pytest.raises(UserError, match=r"'--model\.width' needs a value"):
            split_overrides(words)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--model.num-layer", "4"], "unknown key 'model.num_layer'; did you mean 'num_layers'?"),
        (
            ["--model.architecture", "sha-rnn", "--training.seed", "2"],
            "small.toml has options of adaptive-span, which sha-rnn does not know: start from a recipe of "
            "sha-rnn (sha-rnn, sha-rnn-one), or from your own TOML file",
        ),
        (["--model.architecture", "gpt", "--model.num-layer", "4"], "unknown key 'model.num_layer'"),
        (["--modle.width", "4"], "unknown key 'modle'; did you mean 'model'?"),
        (["--model.width", "wide"], "'model.width' must be a whole number, not 'wide'"),
        (["--stage.7.steps", "4"], "'7' is not one of the 2 entries"),
        (["--training.micro-batches", "7"], "micro_batches must lie between 1 and the batch_size, 6"),
        (["--stage.0.steps", "0"], "steps must be at least 1"),
        (["--training.device", "tpu"], "there is no device 'tpu'"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--data.corpus", "1984"], "there is no corpus, file or folder '1984'"),
        (["--name", "a/b"], "name must be usable for a folder"),
        (["--training.device", "meta"], "there is no device 'meta'"),
        (["--resume", "runs/small"], "leave out all other options"),
    ],
)
def test_mistakes_are_one_line(
    recipe: str, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found_later = ("there is no device", "nowhere.txt", "there is no corpus")  # not in the words alone
    assert main(["train", recipe, *words]) == (1 if complaint.startswith(found_later) else 2)
    complaints = capsys.readouterr().err.splitlines()
    assert len(complaints) == 1
    assert complaints[0].startswith("longspan: ")
    assert complaint in complaints[0]
    assert not (tmp_path / "runs").exists()


def test_an_option_without_its_value_does_not_take_the_next_one(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, "--model.width", "--out", "x"]) == 2
    assert "'--model.width' needs a value" in capsys.readouterr().err


def test_a_text_in_place_of_the_recipe(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.txt").write_text("some text")
    assert main(["train", "my.txt"]) == 1
    assert "my.txt is not a recipe: to train on it, use --data my.txt" in capsys.readouterr().err


def test_an_unknown_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "no-such-recipe"]) == 1
    assert "unknown recipe 'no-such-recipe'" in capsys.readouterr().err


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["train", "--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    for option in documented(RunConfig):
        if "." in option.name:
            assert f"--{option.name.replace('_', '-')}\n" in shown
            assert option.help in shown


def test_what_a_user_sees(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe, "--training.log-every", "20"]) == 0
    shown = capsys.readouterr().out
    assert "run folder     runs/small" in shown
    final = metrics(Path("runs/small"))[-1]["test"]
    counts = f"({final['tokens']:,} tokens, {final['bytes']:,} bytes;"
    assert f"{final['bits_per_byte']:.4f} on the test split {counts}" in shown
    assert "a sample:" in shown
    assert "Learned spans of small after step 43" in shown
    assert Path("runs/small/spans.png").stat().st_size > 1000

    # The same again gets a folder of its own; a folder that was asked for is never taken.
    before = Path("runs/small/metrics.jsonl").read_bytes()
    quick = ["--stage.0.steps", "2", "--stage.1.steps", "1"]
    assert main(["train", recipe, *quick]) == 0
    assert len(metrics(Path("runs/small-2"))) == 3
    assert main(["train", recipe, "--out", "runs/small"]) == 1
    assert "runs/small exists already" in capsys.readouterr().err
    assert Path("runs/small/metrics.jsonl").read_bytes() == before

    assert main(["train", "--resume", "runs/small"]) == 0
    assert capsys.readouterr().out == "runs/small is finished: nothing to do\n"


def test_a_name_and_a_corpus_that_reads_like_a_number(recipe: str, text: Path) -> None:
    Path("1984").write_bytes(text.read_bytes())
    quick = ["--stage.0.steps", "2", "--stage.1.steps", "1"]
    assert main(["train", recipe, "--name", "2024", "--data.corpus", "1984", *quick]) == 0
    config = RunFolder.open(Path("runs/2024")).config
    assert (config.name, config.data.corpus) == ("2024", str(Path("1984").absolute()))


def test_the_folder_names_the_run_unless_it_has_a_name(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--stage.0.steps", "2", "--stage.1.steps", "1"]
    Path("elsewhere").mkdir()
    assert main(["train", recipe, "--out", "elsewhere/mine/", *quick]) == 0
    shown = capsys.readouterr().out
    assert "\nmine: " in shown
    assert "Learned spans of mine after step 3" in shown
    assert "note " not in shown
    assert main(["train", recipe, "--out", "other", "--name", "yours", *quick]) == 0
    assert "\nyours: " in f"\n{capsys.readouterr().out}"
    assert RunFolder.open(Path("other")).config.name == "yours"


def test_the_end_of_training_says_what_the_tokenizer_has_lost(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data.tokenizer.kind", "word", "--data.tokenizer.vocabulary-size", "6"]
    quick = ["--stage.0.steps", "2", "--stage.1.steps", "1", "--data.tokenizer.lowercase", "true"]
    assert main(["train", recipe, *words, *quick]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note ")]
    final = metrics(Path("runs/small"))[-1]
    assert len(notes) == 3
    for split, note in zip(("valid", "test"), notes, strict=False):
        assert 0 < final[split]["unknown"] < final[split]["tokens"]
        assert f"  {final[split]['unknown']:,} of {final[split]['tokens']:,} tokens are <unk>: " in note
    assert "in lower case" in notes[-1]


class TestEvalOptions:
    def score(self, run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
        assert main(["eval", str(run), "--json", *words]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    def test_short_forms_and_dotted_forms_are_the_same(
        self, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        values = {"max-tokens": "90", "batch-size": "2", "block-length": "8", "protocol": "transformer-xl"}
        short = [word for name, value in values.items() for word in (f"--{name}", value)]
        dotted = [f"--evaluation.{name}={value}" for name, value in values.items()]
        found = self.score(uninterrupted, capsys, *short)
        assert (found["batch_size"], found["block_length"], found["protocol"]) == (2, 8, "transformer-xl")
        assert found["tokens"] <= 90 < found["tokens"] + found["skipped"]
        assert self.score(uninterrupted, capsys, *dotted) == found

    def test_the_limit_while_training_is_no_limit_here(
        self, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert RunFolder.open(uninterrupted).config.evaluation.max_tokens == 300
        found = self.score(uninterrupted, capsys, "--split", "valid")
        assert found["skipped"] == 1
        assert found["tokens"] > 300

    @pytest.mark.parametrize(
        ("words", "complaint"),
        [
            (["--training.block-length", "8"], "'--training.block-length' has no effect on eval"),
            (["--data.corpus", "x"], "has no effect on eval: use --model.* and --evaluation.*"),
            (["--stage.0.steps", "1"], "'--stage.0.steps' has no effect on eval"),
            (["--evaluation.max-tokens-final", "5"], "--max-tokens to limit the tokens"),
            (["--batch-size", "2", "--evaluation.batch-size", "3"], "are the same option: give one"),
            (["--model.architecture", "gpt"], "the weights belong to one architecture"),
            (["--max-tokens", "0"], "max_tokens must be at least 1"),
            (["--max-tokens", "few"], "'evaluation.max_tokens' must be a whole number, not 'few'"),
            (["--evaluation.batchsize", "2"], "did you mean 'batch_size'?"),
        ],
    )
    def test_what_would_change_nothing_is_refused(
        self, uninterrupted: Path, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["eval", str(uninterrupted), *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert complaint in line


def test_memory_that_does_not_suffice_is_one_line(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The model is small; what it remembers needs more than any machine has addresses for."""
    long = ["--model.architecture", "transformer-xl", "--model.start", "zeros", "--model.span", "none"]
    assert main(["train", recipe, *long, "--model.memory-length", str(2**44)]) == 1
    (complaint,) = capsys.readouterr().err.splitlines()
    assert complaint.startswith(
        "longspan: there is not enough memory: raise training.micro_batches, or lower "
    )


def test_divergence_is_one_line(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    hot = ["--stage.0.optimizer", "sgd", "--stage.0.learning-rate", "1e9", "--stage.0.clip-norm", "0"]
    assert main(["train", recipe, *hot]) == 1
    (complaint,) = capsys.readouterr().err.splitlines()
    assert "at step 2 with learning rate 9.96e+08" in complaint


def send(number: int, process: int) -> None:
    """When the run has logged something."""
    log = Path("a long run/metrics.jsonl")
    deadline = time.monotonic() + 60
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process, number)


def check_stopped(number: int, complaint: str) -> None:
    name = signal.Signals(number).name
    assert complaint == f"longspan: stopped by {name}; continue with 'longspan train --resume 'a long run''\n"
    assert Path("a long run/checkpoints/last.safetensors").is_file()


LONG = ("--out", "a long run", "--stage.0.steps", "1000000")


def test_a_signal_from_outside(recipe: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "longspan", "train", recipe, *LONG],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    send(signal.SIGINT, process.pid)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130, complaint
    check_stopped(signal.SIGINT, complaint)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_another_signal_from_outside(recipe: str, number: int, status: int) -> None:
    out, err = Path("out.txt"), Path("err.txt")
    process = forks.start(forks.longspan, "train", recipe, *LONG, out=out, err=err)
    assert process.pid is not None
    send(number, process.pid)
    assert forks.finish(process, 60) == status, err.read_text()
    check_stopped(number, err.read_text())
