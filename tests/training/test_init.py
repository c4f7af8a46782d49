"""`--init`: a run that starts from weights of another."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

import longspan
from longspan.cli import main
from longspan.errors import UserError
from longspan.models.interface import LanguageModel
from longspan.runs import RunFolder, checkpoint
from longspan.runs.init import Init
from longspan.training import Interrupted, resume, train
from tests.search.searches import search_config

from .runs import Lines, Signals, metrics, outcome, small_config, small_table
from .test_resume import Dies

WORDS = {"kind": "word", "vocabulary_size": 10}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text with the same words in another order, so that counting them gives other numbers."""
    path = tmp_path_factory.mktemp("other") / "other.txt"
    path.write_text("a dog ran on the mat\nthe dog sat\n" * 500)
    return path


def first_weights(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(RunFolder.open(run).init).below("model")


def model_of(file: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(file).below("model")


class TestWeights:
    def test_they_are_those_of_the_best_checkpoint(
        self, other: Path, uninterrupted: Path, tmp_path: Path
    ) -> None:
        said = Lines()
        config = small_config(other, stage__0__optimizer="sgd", training__seed=5)
        run = train(config, tmp_path / "run", init=Init(uninterrupted), reporter=said)
        best = uninterrupted / "checkpoints" / "best.safetensors"
        assert f"starting from the weights of {best}" in said.lines
        given, taken = model_of(best), first_weights(run.path)
        assert given.keys() == taken.keys()
        assert all(taken[name].equal(tensor) for name, tensor in given.items())
        assert run.started_from == {
            "weights": str(best),
            "sha256": hashlib.sha256(best.read_bytes()).hexdigest(),
            "partial": False,
            "tokenizer": True,
        }

    def test_other_options_of_the_model_are_named(
        self, text: Path, uninterrupted: Path, tmp_path: Path
    ) -> None:
        """The weights fit, and mean something else."""
        said = Lines()
        options = {
            "model__span__ramp": 8,
            "model__dropout": 0.0,
            "stage__0__steps": 1,
            "stage__1__steps": 1,
        }
        train(small_config(text, **options), tmp_path / "run", init=Init(uninterrupted), reporter=said)
        (notice,) = (line for line in said.lines if "other options" in line)
        assert notice == f"the model has other options than {uninterrupted}: model.span.ramp 4 -> 8"

    def test_training_starts_with_them(self, text: Path, uninterrupted: Path, tmp_path: Path) -> None:
        train(small_config(text), tmp_path / "run", init=Init(uninterrupted))
        assert metrics(tmp_path / "run")[0]["loss"] < metrics(uninterrupted)[0]["loss"] - 1

    def test_windows_follow_the_loaded_spans(
        self, text: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refreshed: list[Any] = []
        refresh = LanguageModel.refresh

        def spy(model: LanguageModel) -> None:
            refresh(model)
            refreshed.append(model.records()["spans"]["spans"])

        monkeypatch.setattr(LanguageModel, "refresh", spy)
        with pytest.raises(MemoryError):
            train(small_config(text), tmp_path / "run", init=Init(uninterrupted), reporter=Dies("step 1 "))
        monkeypatch.undo()
        assert refreshed[0] == longspan.load(uninterrupted, device="cpu").spans()

    def test_a_file_chooses_the_checkpoint(self, text: Path, uninterrupted: Path, tmp_path: Path) -> None:
        last = uninterrupted / "checkpoints" / "last.safetensors"
        run = train(small_config(text, stage__0__steps=1), tmp_path / "run", init=Init(last)).path
        assert all(first_weights(run)[name].equal(tensor) for name, tensor in model_of(last).items())
        again = train(
            small_config(text, stage__0__steps=1), tmp_path / "again", init=Init(run / "init.safetensors")
        )
        assert outcome(again.path) == outcome(run)

    def test_averaged_weights_are_those_of_best(self, text: Path, tmp_path: Path) -> None:
        first = train(small_config(text, training__average=0.9), tmp_path / "first").path
        run = train(small_config(text, training__average=0.9), tmp_path / "run", init=Init(first)).path
        best = checkpoint.load(first / "checkpoints" / "best.safetensors")
        name = "embedding.weight"
        assert first_weights(run)[name].equal(best.below("average")[name])

    def test_counters_of_updates_begin_anew(self, text: Path, tmp_path: Path) -> None:
        ramped = {"model__span__penalty_full": 9}
        first = train(small_config(text, **ramped), tmp_path / "first").path
        (counter,) = [
            name for name in model_of(first / "checkpoints" / "best.safetensors") if "updates" in name
        ]
        run = train(small_config(text, **ramped), tmp_path / "run", init=Init(first)).path
        assert model_of(first / "checkpoints" / "best.safetensors")[counter] > 0
        assert first_weights(run)[counter] == 0
        plain = train(small_config(text), tmp_path / "plain", init=Init(first)).path
        assert counter not in first_weights(plain)


class TestWhatDoesNotFit:
    def test_is_named_and_refused(self, text: Path, uninterrupted: Path, tmp_path: Path) -> None:
        deeper = small_config(text, model__num_layers=2)
        with pytest.raises(
            UserError, match=r"does not fit the model: \d+ tensors missing \(blocks\.2\..*\.\.\.\)"
        ):
            train(deeper, tmp_path / "run", init=Init(uninterrupted))
        wider = small_config(text, model__inner_width=48)
        with pytest.raises(UserError, match=r"of another shape .*\[32, 16\] where the model has \[48, 16\]"):
            train(wider, tmp_path / "run", init=Init(uninterrupted))
        assert not (tmp_path / "run").exists()

    def test_is_left_out_with_partial(self, text: Path, uninterrupted: Path, tmp_path: Path) -> None:
        wider = small_config(text, model__inner_width=48, model__num_layers=2)
        run = train(
            wider, tmp_path / "run", init=Init(uninterrupted, partial=True), reporter=(said := Lines())
        )
        given = model_of(uninterrupted / "checkpoints" / "best.safetensors")
        taken = first_weights(run.path)
        fresh = train(wider, tmp_path / "fresh", init=None).path
        fits = [n for n, t in taken.items() if n in given and given[n].shape == t.shape]
        assert 0 < len(fits) < len(given) < len(taken)
        assert all(taken[name].equal(given[name]) for name in fits)
        assert any(line.startswith(f"starting from {len(fits)} tensors of ") for line in said.lines)
        assert any("not taken from" in line and "missing" in line for line in said.lines)
        assert fresh.is_dir()

    def test_nothing_fits(self, text: Path, uninterrupted: Path, tmp_path: Path) -> None:
        nothing = tmp_path / "empty.safetensors"
        checkpoint.save(nothing, {"state.x": torch.ones(2)}, {})
        with pytest.raises(UserError, match="has nothing that fits the model"):
            train(small_config(text), tmp_path / "run", init=Init(nothing, partial=True))

    def test_other_files(self, text: Path, tmp_path: Path) -> None:
        config = small_config(text)
        with pytest.raises(UserError, match=r"there is no run folder or checkpoint .*nowhere"):
            train(config, tmp_path / "run", init=Init(tmp_path / "nowhere"))
        (tmp_path / "model.pt").write_bytes(b"PK")
        with pytest.raises(UserError, match=r"model\.pt is not a checkpoint of longspan.*longspan import"):
            train(config, tmp_path / "run", init=Init(tmp_path / "model.pt"))
        (tmp_path / "folder").mkdir()
        with pytest.raises(UserError, match="is not a run folder"):
            train(config, tmp_path / "run", init=Init(tmp_path / "folder"))

    def test_a_search_begins_with_new_weights(self, text: Path, uninterrupted: Path, tmp_path: Path) -> None:
        from longspan.search import Searching

        with pytest.raises(UserError, match="a search begins with new weights: leave out --init"):
            train(search_config(text), tmp_path / "run", init=Init(uninterrupted), strategy=Searching)


class TestTokens:
    @pytest.fixture
    def words(self, text: Path, tmp_path: Path) -> Path:
        """A run with a vocabulary of words."""
        table = small_table(text)
        table["data"]["tokenizer"] = WORDS
        return longspan.train(table, out=tmp_path / "words").path

    def test_keep_their_meaning(self, words: Path, other: Path, tmp_path: Path) -> None:
        said = Lines()
        run = longspan.train(
            small_table(other), out=tmp_path / "run", init=words, init_partial=False, progress=said
        )
        assert run.load(device="cpu").tokenizer.words == RunFolder.open(words).tokenizer().words
        assert run.config.data.tokenizer.kind == "word"
        assert run.final["test"]["unknown"] == 0
        assert any(line.startswith(f"tokenizer of {words}: word, vocabulary 10") for line in said.lines)
        score = longspan.evaluate(run, device="cpu")
        assert score.loss == pytest.approx(run.final["test"]["loss"])

    def test_other_meanings_are_said(self, words: Path, other: Path, tmp_path: Path) -> None:
        said = Lines()
        options = {"data__tokenizer__kind": "word", "data__tokenizer__vocabulary_size": 10}
        (tmp_path / "cat.txt").write_text(other.read_text().replace("a dog", "cat a dog"))
        longspan.train(
            small_table(tmp_path / "cat.txt"), out=tmp_path / "run", init=words, progress=said, **options
        )
        assert any(f"tokens mean something else than in {words}" in line for line in said.lines)

    def test_unknown_symbols_are_one_line(self, text: Path, other: Path, tmp_path: Path) -> None:
        table = small_table(other)
        table["data"]["tokenizer"] = {"kind": "character"}
        first = longspan.train(table, out=tmp_path / "first").path
        with pytest.raises(
            UserError,
            match=r"text cannot be read with the vocabulary of the initial weights: .*characters 'c'",
        ):
            longspan.train(small_table(text), out=tmp_path / "run", init=first)
        assert not (tmp_path / "run").exists()

    def test_a_file_alone_has_no_vocabulary(self, text: Path, uninterrupted: Path, tmp_path: Path) -> None:
        file = tmp_path / "a" / "weights.safetensors"
        file.parent.mkdir()
        shutil.copy(uninterrupted / "checkpoints" / "best.safetensors", file)
        run = train(small_config(text), tmp_path / "run", init=Init(file), reporter=(said := Lines()))
        assert any("has no vocabulary with it" in line for line in said.lines)
        assert run.started_from is not None
        assert run.started_from["tokenizer"] is False
        with pytest.raises(UserError, match="its configuration is unknown: give a recipe"):
            longspan.train(init=file)

    def test_tokens_from_python_are_those_of_the_run(self, words: Path, text: Path, tmp_path: Path) -> None:
        ids = RunFolder.open(words).tokenizer().encode(text.read_text())
        data = {"train": ids[:2500], "valid": ids[2500:]}
        run = longspan.train(small_table(text), data, tmp_path / "run", init=words)
        assert run.config.data.tokenizer.kind == "word"
        assert (
            run.metrics[0]["loss"] < json.loads((words / "metrics.jsonl").read_text().splitlines()[0])["loss"]
        )


class TestResume:
    @pytest.fixture
    def source(self, uninterrupted: Path, tmp_path: Path) -> Path:
        """A copy, which a test may delete: a run needs no other run once it has begun."""
        return Path(shutil.copytree(uninterrupted, tmp_path / "source"))

    @pytest.mark.parametrize("words", ["train step 1 ", "train step 12 ", "fine step 31 ", "scoring test"])
    def test_is_exact(self, other: Path, source: Path, tmp_path: Path, words: str) -> None:
        config = small_config(other)
        whole = train(config, tmp_path / "whole", init=Init(source)).path
        with pytest.raises(Interrupted):
            train(config, tmp_path / "run", init=Init(source), reporter=Signals(words, signal.SIGINT))
        shutil.rmtree(source)
        resume(tmp_path / "run")
        assert outcome(tmp_path / "run") == outcome(whole)

    @pytest.mark.parametrize("partial", [False, True])
    def test_is_exact_before_the_first_checkpoint(
        self, other: Path, source: Path, tmp_path: Path, partial: bool
    ) -> None:
        config = small_config(other, model__inner_width=48) if partial else small_config(other)
        whole = train(config, tmp_path / "whole", init=Init(source, partial)).path
        with pytest.raises(MemoryError):
            train(config, tmp_path / "run", init=Init(source, partial), reporter=Dies("step 5 "))
        assert not list((tmp_path / "run" / "checkpoints").iterdir())
        shutil.rmtree(source)
        resume(tmp_path / "run")
        assert outcome(tmp_path / "run") == outcome(whole)

    def test_keeps_the_vocabulary(self, text: Path, other: Path, tmp_path: Path, monkeypatch: Any) -> None:
        table = small_table(text)
        table["data"]["tokenizer"] = WORDS
        first = longspan.train(table, out=tmp_path / "first").path
        config = small_config(other)
        whole = train(config, tmp_path / "whole", init=Init(first)).path
        with pytest.raises(Interrupted):
            train(config, tmp_path / "run", init=Init(first), reporter=Signals("step 12 ", signal.SIGINT))
        shutil.rmtree(first)
        monkeypatch.setenv("LONGSPAN_HOME", str(tmp_path / "another-home"))  # token files are made again
        resume(tmp_path / "run")
        assert outcome(tmp_path / "run") == outcome(whole)

    def test_first_weights_that_are_lost_are_named(self, other: Path, source: Path, tmp_path: Path) -> None:
        with pytest.raises(MemoryError):
            train(small_config(other), tmp_path / "run", init=Init(source), reporter=Dies("step 5 "))
        (tmp_path / "run" / "init.safetensors").unlink()
        with pytest.raises(UserError, match=r"there is no checkpoint .*init\.safetensors"):
            resume(tmp_path / "run")


class TestCommand:
    @pytest.fixture
    def recipe(self, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.chdir(tmp_path)
        Path("small.toml").write_text(tomli_w.dumps(small_table(other)))
        return "small.toml"

    def test_with_a_recipe(
        self, recipe: str, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["train", recipe, "--init", str(uninterrupted), "--out", "run"]) == 0
        shown = capsys.readouterr().out
        assert f"tokenizer of {uninterrupted}: byte, vocabulary 256" in shown
        assert f"starting from the weights of {uninterrupted}/checkpoints/best.safetensors" in shown
        with_python = longspan.train(recipe, out="run2", init=uninterrupted)
        assert outcome(Path("run")) == outcome(with_python.path)

    def test_without_a_recipe_it_is_the_run_again(
        self, recipe: str, uninterrupted: Path, other: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["--data", str(other), "--stage.0.steps", "3", "--stage.1.steps", "2"]
        assert main(["train", "--init", str(uninterrupted), "--out", "run", *words]) == 0
        config = RunFolder.open(Path("run")).config
        assert (config.name, config.description) == ("run", "Starts from the weights of small")
        assert config.model == RunFolder.open(uninterrupted).config.model
        assert [stage.steps for stage in config.stage] == [3, 2]

    @pytest.mark.parametrize(
        ("words", "complaint"),
        [
            (["--init", ""], "--init is empty"),
            (["--init", "nowhere"], "there is no run folder or checkpoint nowhere"),
            (["--init-partial"], "--init-partial needs the weights to start from"),
            (["--or-resume"], "--or-resume needs the run folder: give --out RUN"),
        ],
    )
    def test_mistakes_are_one_line(
        self, recipe: str, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["train", recipe, *words]) == (1 if "nowhere" in words else 2)
        (line,) = capsys.readouterr().err.splitlines()
        assert complaint in line
        assert not Path("runs").exists()
