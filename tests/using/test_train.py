"""Training from Python: recipes, tables, overrides, token arrays, blocks, callbacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import longspan
from longspan.config import RunConfig, schema
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.errors import UserError
from tests.training.runs import Lines, metrics, outcome, small_config, small_table, write_text

LETTERS = 9


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


@pytest.fixture
def short(text: Path) -> dict[str, Any]:
    """A run of a second."""
    table = small_table(text)
    table["training"] |= {"batch_size": 4, "block_length": 12, "block_jitter": False, "micro_batches": 1}
    table["training"] |= {"log_every": 4, "evaluate_every": 8, "checkpoint_every": 5}
    table["stage"] = [
        {"steps": 10, "learning_rate": 0.01},
        {"name": "fine", "steps": 6, "learning_rate": 0.001},
    ]
    return table


def some_ids(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, LETTERS, length)


def splits(**changes: Any) -> dict[str, Any]:
    return {"train": some_ids(2000), "valid": some_ids(300, 1), "test": some_ids(200, 2)} | changes


class TestWhatIsTrained:
    def test_a_table_with_overrides(self, short: dict[str, Any], tmp_path: Path) -> None:
        run = longspan.train(
            short, out=tmp_path / "run", model__num_layers=2, stage__0__steps=3, **{"training.seed": 7}
        )
        assert run.path == tmp_path / "run"
        assert run.config.name == "run"
        assert (run.config.model.num_layers, run.config.training.seed) == (2, 7)
        assert run.config == RunConfig.from_toml((run.path / "config.toml").read_bytes(), "config.toml")
        assert run.metrics[-1] == run.final == metrics(run.path)[-1]
        assert run.final["valid"]["bits_per_byte"] > 0
        assert short["stage"][0]["steps"] == 10  # the table that was given is not changed
        assert run.load().tokenizer.vocabulary_size == 256

    def test_a_recipe_a_file_and_a_config_train_the_same(self, short: dict[str, Any], tmp_path: Path) -> None:
        file = tmp_path / "mine.toml"
        file.write_text(schema.format_toml(short))
        config = schema.read(RunConfig, short)
        ways = [short, file, str(file), config]
        runs = [longspan.train(way, out=tmp_path / str(number)) for number, way in enumerate(ways)]
        first = outcome(runs[0].path)
        assert all(outcome(run.path) == first for run in runs[1:])
        assert runs[3].config == config
        assert runs[3].config.model is config.model

    def test_another_corpus(self, short: dict[str, Any], text: Path, tmp_path: Path) -> None:
        other = tmp_path / "other.txt"
        other.write_text(text.read_text() * 2)
        run = longspan.train(short, data=other, out=tmp_path / "run", stage__0__steps=2)
        assert run.config.data.corpus == str(other)

    def test_the_folder_is_free_by_default(
        self, short: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        paths = [longspan.train(short, stage__0__steps=1, stage__1__steps=1).path for _ in range(2)]
        assert paths == [Path("runs/small"), Path("runs/small-2")]
        with pytest.raises(UserError, match="exists already"):
            longspan.train(short, out="runs/small")

    def test_it_is_quiet_unless_told(
        self, short: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        longspan.train(short, out=tmp_path / "quiet")
        assert capsys.readouterr() == ("", "")
        longspan.train(short, out=tmp_path / "loud", progress=True)
        assert "held-out loss" in capsys.readouterr().out
        lines = Lines()
        longspan.train(short, out=tmp_path / "lines", progress=lines)
        assert any("parameters" in line for line in lines.lines)

    @pytest.mark.parametrize(
        ("wrong", "complaint"),
        [
            ({"model__num_layer": 2}, r"unknown key 'model\.num_layer'; did you mean 'num_layers'"),
            ({"steps": 2}, "unknown key 'steps'"),
            ({"stage__7__steps": 2}, "is not one of the 2 entries"),
            ({"model__num_layers": "many"}, "must be a whole number"),
            ({"model__num_layers": object()}, "must be text, a number"),
            ({"vocabulary_size": 5}, "are for token ids"),
            ({"data": {"train": [1]}, "vocabulary_size": 5}, "no 'valid' split"),
            ({"data": [1, 2], "vocabulary_size": 5}, r"token ids need splits: data=\{'train': ids, 'valid'"),
            ({"data": [1, 2]}, "token ids need splits"),
            ({"model__pattern": "i", "stage__0__optimizer": "muon"}, "muon needs matrices"),
        ],
    )
    def test_mistakes_are_one_line(
        self, short: dict[str, Any], tmp_path: Path, wrong: dict[str, Any], complaint: str
    ) -> None:
        with pytest.raises(UserError, match=complaint) as problem:
            longspan.train(short, out=tmp_path / "run", **wrong)
        assert "\n" not in str(problem.value)
        assert not (tmp_path / "run").exists()

    def test_the_config_is_used_as_it_is(
        self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A configuration that TOML cannot give back, such as one of a class that nobody registered."""

        def read(*_: Any) -> RunConfig:
            raise AssertionError("the configuration was read back")

        monkeypatch.setattr(RunConfig, "from_toml", staticmethod(read))
        config = small_config(text, stage__0__steps=2, stage__1__steps=2)
        folder = longspan.training.train(config, tmp_path / "run")
        assert folder.config.model is config.model
        assert folder.final() is not None


class TestCallback:
    def test_it_gets_every_line(self, short: dict[str, Any], tmp_path: Path) -> None:
        lines: list[dict[str, Any]] = []
        run = longspan.train(short, out=tmp_path / "run", callback=lines.append)
        assert lines == run.metrics[:-1]
        assert {line["kind"] for line in lines} == {"train", "valid"}

    @pytest.mark.parametrize(("kind", "step"), [("train", 4), ("train", 16), ("valid", 8), ("valid", 16)])
    def test_false_stops_and_the_run_goes_on_as_if_nothing_had_been(
        self, short: dict[str, Any], tmp_path: Path, kind: str, step: int
    ) -> None:
        whole = longspan.train(short, out=tmp_path / "whole")
        asked: list[int] = []

        def stop(line: dict[str, Any]) -> bool | None:
            asked.append(line["step"])
            line["loss"] = 0.0  # what it does with its line is its own business
            return False if (line["kind"], line["step"]) == (kind, step) else None

        stopped = longspan.train(short, out=tmp_path / "run", callback=stop)
        assert asked[-1] == step
        assert stopped.final is None
        assert (stopped.path / "checkpoints" / "last.safetensors").is_file()
        resumed = longspan.resume(stopped)
        assert resumed.final is not None
        assert outcome(resumed.path)["metrics"] == [
            line | {"stage": line["stage"]} if "stage" in line else line
            for line in outcome(whole.path)["metrics"]
        ]
        assert outcome(resumed.path)["last"] == outcome(whole.path)["last"]

    def test_what_it_raises_is_raised(self, short: dict[str, Any], tmp_path: Path) -> None:
        def fail(line: dict[str, Any]) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            longspan.train(short, out=tmp_path / "run", callback=fail)


class TestArrays:
    def test_the_same_tokens_train_the_same_weights(self, short: dict[str, Any], tmp_path: Path) -> None:
        """As a corpus of bytes, and as its bytes in arrays."""
        from longspan.data import prepare

        corpus = longspan.train(short, out=tmp_path / "corpus")
        files = prepare(corpus.config.data).splits
        arrays = {split: np.array(files[split].tokens) for split in files}
        del short["data"]
        run = longspan.train(short, arrays, tmp_path / "arrays", tokenizer=ByteTokenizer())
        assert outcome(run.path)["metrics"] == outcome(corpus.path)["metrics"]  # bits per byte too
        assert outcome(run.path)["best"][1] == outcome(corpus.path)["best"][1]
        assert run.load().generate("the", tokens=5, seed=1) == corpus.load().generate("the", tokens=5, seed=1)

    @pytest.mark.parametrize("form", [np.asarray, torch.from_numpy, list, lambda ids: ids.astype(np.uint8)])
    def test_forms_of_arrays(self, short: dict[str, Any], tmp_path: Path, form: Any) -> None:
        data = {split: form(ids) for split, ids in splits().items()}
        run = longspan.train(short, data, tmp_path / "run", vocabulary_size=LETTERS)
        assert run.final is not None
        for line in [*run.metrics[:-1], run.final["valid"], run.final["test"]]:
            assert line["loss"] > 0
            assert "bits_per_byte" not in line
            assert "bytes" not in line
        assert run.final["valid"]["bits_per_token"] == pytest.approx(run.final["valid"]["loss"] / np.log(2))
        assert run.load().generate("1 2 3", tokens=4).split()

    def test_without_a_test_split_there_is_no_test_score(self, short: dict[str, Any], tmp_path: Path) -> None:
        data = splits()
        del data["test"]
        run = longspan.train(short, data, tmp_path / "run", vocabulary_size=LETTERS)
        assert run.final is not None
        assert "valid" in run.final
        assert "test" not in run.final

    def test_resuming_needs_the_same_arrays(self, short: dict[str, Any], tmp_path: Path) -> None:
        whole = longspan.train(short, splits(), tmp_path / "whole", vocabulary_size=LETTERS)
        run = longspan.train(
            short, splits(), tmp_path / "run", vocabulary_size=LETTERS, callback=lambda line: line["step"] < 8
        )
        assert run.final is None
        with pytest.raises(UserError, match=r"longspan\.resume\('.*', data=\.\.\.\) and the same tokens"):
            longspan.resume(run.path)
        for changed in (splits(train=some_ids(2000, 9)), splits(valid=some_ids(299, 1))):
            with pytest.raises(UserError, match="have changed since"):
                longspan.resume(run.path, changed)
        longspan.resume(run.path, splits())
        assert outcome(run.path) == outcome(whole.path)

    def test_a_run_with_a_corpus_takes_no_arrays(self, short: dict[str, Any], tmp_path: Path) -> None:
        run = longspan.train(short, out=tmp_path / "run", callback=lambda line: False)
        with pytest.raises(UserError, match="was trained on the corpus"):
            longspan.resume(run, {split: ids % 9 for split, ids in splits().items()})

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"train": some_ids(2000) - 1}, "the train split has the token -1, but the vocabulary is 0 to 8"),
            ({"test": some_ids(200) + 1}, "the test split has the token 9"),
            (
                {"valid": some_ids(200) * 1.0},
                "the valid split must be an integer array with 1 dimension, not float64",
            ),
            ({"valid": some_ids(200).reshape(2, 100)}, r"of shape \(2, 100\)"),
            ({"valid": some_ids(0)}, "the valid split is empty"),
            ({"train": some_ids(20)}, "the text has 20 tokens"),
            ({"tset": some_ids(20)}, "a split 'tset'; did you mean 'test'"),
        ],
    )
    def test_wrong_arrays(
        self, short: dict[str, Any], tmp_path: Path, changes: dict[str, Any], complaint: str
    ) -> None:
        with pytest.raises(UserError, match=complaint):
            longspan.train(short, splits(**changes), tmp_path / "run", vocabulary_size=LETTERS)
        assert not (tmp_path / "run").exists()

    def test_tokens_need_a_vocabulary(self, short: dict[str, Any], tmp_path: Path) -> None:
        for vocabulary in ({}, {"vocabulary_size": 9, "tokenizer": ByteTokenizer()}):
            with pytest.raises(UserError, match="either vocabulary_size"):
                longspan.train(short, splits(), tmp_path / "run", **vocabulary)


def blocks_from(start: int, count: int = 30) -> Iterator[np.ndarray]:
    """Four lanes through the same tokens as `splits`, as `Lanes` cuts them."""
    lanes = some_ids(2000).reshape(4, 500)
    for number in range(start, count):
        yield lanes[:, 12 * number : 12 * number + 13]


class TestBlocks:
    def test_blocks_train_as_the_array_they_are_cut_from(self, short: dict[str, Any], tmp_path: Path) -> None:
        whole = longspan.train(short, splits(), tmp_path / "array", vocabulary_size=LETTERS)
        for number, train in enumerate(
            (
                blocks_from(0),
                list(blocks_from(0)),
                blocks_from,
                ((b[:, :-1], b[:, 1:]) for b in blocks_from(0)),
            )
        ):
            run = longspan.train(short, splits(train=train), tmp_path / str(number), vocabulary_size=LETTERS)
            assert outcome(run.path)["metrics"] == outcome(whole.path)["metrics"]
            assert outcome(run.path)["last"][1] == outcome(whole.path)["last"][1]

    def test_a_flag_begins_the_state_anew(self, short: dict[str, Any], tmp_path: Path) -> None:
        def flagged(begins: bool) -> Iterator[tuple[Any, Any, bool]]:
            for block in blocks_from(0):
                yield torch.from_numpy(block[:, :-1]), torch.from_numpy(block[:, 1:]), begins

        losses = [
            longspan.train(
                short, splits(train=flagged(begins)), tmp_path / str(begins), vocabulary_size=LETTERS
            ).metrics[0]["loss"]
            for begins in (False, True)
        ]
        assert losses[0] != losses[1]

    def test_the_end_of_the_blocks_is_the_end_of_training(
        self, short: dict[str, Any], tmp_path: Path
    ) -> None:
        data = splits(train=blocks_from(0, count=7))
        run = longspan.train(short, data, tmp_path / "run", vocabulary_size=LETTERS)
        assert run.final is not None
        assert run.metrics[-2]["step"] == 7
        longspan.resume(run, splits(train=blocks_from(0)))  # it is finished: nothing to do
        assert run.metrics[-2]["step"] == 7

    def test_only_a_function_can_be_resumed(self, short: dict[str, Any], tmp_path: Path) -> None:
        whole = longspan.train(short, splits(train=blocks_from), tmp_path / "whole", vocabulary_size=LETTERS)
        run = longspan.train(
            short,
            splits(train=blocks_from(0)),
            tmp_path / "run",
            vocabulary_size=LETTERS,
            callback=lambda line: line["step"] < 8,
        )
        with pytest.raises(UserError, match="cannot be resumed from an iterator: pass as data"):
            longspan.resume(run, splits(train=blocks_from(0)))
        longspan.resume(run, splits(train=blocks_from))
        assert outcome(run.path) == outcome(whole.path)

    @pytest.mark.parametrize(
        ("train", "complaint"),
        [
            ([], "has no blocks"),
            ([some_ids(13)], "training block 0 must be an integer array with 2 dimensions"),
            ([some_ids(39).reshape(3, 13)], "has 3 lanes of 12 tokens: training.batch_size is 4"),
            ([some_ids(56).reshape(4, 14)], "4 lanes of 13 tokens: .*training.block_length 12"),
            ([some_ids(52).reshape(4, 13) + 5], "the vocabulary is 0 to 8"),
            ([(some_ids(52).reshape(4, 13), some_ids(8).reshape(4, 2))], "and targets of"),
            ([(some_ids(52).reshape(4, 13),)], r"must be \(tokens, targets\)"),
        ],
    )
    def test_wrong_blocks(self, short: dict[str, Any], tmp_path: Path, train: Any, complaint: str) -> None:
        with pytest.raises(UserError, match=complaint):
            longspan.train(short, splits(train=train), tmp_path / "run", vocabulary_size=LETTERS)
        assert not (tmp_path / "run").exists()

    def test_steps_that_are_taken_back_need_a_function(self, short: dict[str, Any], tmp_path: Path) -> None:
        def train(source: Any, out: str) -> longspan.Run:
            return longspan.train(
                short,
                splits(train=source),
                tmp_path / out,
                vocabulary_size=LETTERS,
                training__compile_warmup=2,
            )

        with pytest.raises(UserError, match=r"training\.compile_warmup reads the first blocks twice"):
            train(blocks_from(0), "iterator")
        assert not (tmp_path / "iterator").exists()
        assert train(blocks_from, "function").final is not None


def test_what_a_run_wrote_can_be_read_without_torch(short: dict[str, Any], tmp_path: Path) -> None:
    run = longspan.train(short, out=tmp_path / "run")
    assert json.loads((run.path / "corpus.json").read_text())["name"] == run.config.data.corpus
    assert repr(run) == f"Run('{run.path}')"
    assert longspan.load(run).config == run.config
