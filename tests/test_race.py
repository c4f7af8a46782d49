"""The race: which bytes it takes, that each is scored once with enough before it, and what it reports."""

from __future__ import annotations

import argparse
import json
import lzma
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import race
import race_corpus
import race_protocol
import race_x_transformers
from longspan import cli, recipes
from longspan.config import AdaptiveSpanConfig, DataConfig, RunConfig, SpanConfig, schema
from longspan.data import prepare
from longspan.errors import UserError
from longspan.models import build
from longspan.training import Interrupted

CPU = torch.device("cpu")
TEXT = "".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(2500)).encode()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGSPAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def nats_of(
    value: Any, readings: list[race_protocol.Reading], test: np.ndarray, block: int, batch_size: int = 3
) -> float:
    """The sum over what is scored of `value(target, bytes before it in its reading)`."""

    def read(tokens_BT: Tensor, targets_BT: Tensor, seen: int | None) -> tuple[Tensor, int]:
        assert torch.equal(tokens_BT[:, 1:], targets_BT[:, :-1])
        start = seen or 0
        before_T = torch.arange(start + 1, start + 1 + tokens_BT.shape[1])
        return value(targets_BT, before_T.expand_as(targets_BT)).double(), start + tokens_BT.shape[1]

    before = np.full(2000, 10**9)  # if it were scored, every sum would show it
    return race_protocol.nats(
        read, before, test, readings, batch_size=batch_size, block_length=block, device=CPU
    )


SMALL, CONTEXT = st.integers(1, 70), st.integers(2, 40)


@settings(max_examples=60, deadline=None)
@given(
    num_bytes=SMALL, context=st.integers(2, 40), lanes=st.integers(1, 9), block=SMALL, warm=st.integers(0, 50)
)
def test_every_byte_is_scored_once_with_half_a_context_before_it(
    num_bytes: int, context: int, lanes: int, block: int, warm: int
) -> None:
    test = np.arange(num_bytes)
    for readings, wanted in (
        (race_protocol.windows(num_bytes, context), context // 2),
        (race_protocol.streams(num_bytes, lanes, warm), warm),
    ):
        for power in (0, 1, 2):  # how many, which ones, and none twice
            found = nats_of(lambda target, _, p=power: target.double() ** p, readings, test, block)
            assert found == sum(n**power for n in range(num_bytes))
        too_short = nats_of(lambda _, before, w=wanted: before <= w, readings, test, block)
        assert too_short == 0
    assert all(reading.length <= context for reading in race_protocol.windows(num_bytes, context))


def test_too_little_text_before_the_test_is_said() -> None:
    readings, _ = race._readings(9000, 100)  # of x-transformers
    assert race_protocol.check_reach(readings, 4501) == 4501
    with pytest.raises(UserError, match="2,002 bytes must come before the scored part, not 2,000"):
        nats_of(lambda target, _: target, race_protocol.streams(4, 1, 2001), np.arange(4), 8)


def test_files_come_in_the_order_of_their_paths_and_are_cut_90_5_5(tmp_path: Path, home: Path) -> None:
    source = tmp_path / "source"
    (source / "b").mkdir(parents=True)
    (source / "b" / "first.py").write_bytes(b"B" * 60)
    (source / "a.py").write_bytes(b"A" * 50)
    (source / "c.py").write_bytes(b"C" * 500)
    (source / "a.txt").write_bytes(b"-" * 50)
    folder = race_corpus.written(source, num_bytes=200)
    parts = [(folder / f"{split}.txt").read_bytes() for split in ("train", "valid", "test")]
    assert list(map(len, parts)) == [180, 10, 10]
    assert b"".join(parts) == b"A" * 50 + b"B" * 60 + b"C" * 90
    assert race_corpus.written(source, num_bytes=200) == folder
    assert race_corpus.written(source, num_bytes=300) != folder
    assert folder.is_relative_to(home)


def test_the_test_is_the_first_mebibyte_of_its_part(tmp_path: Path, home: Path) -> None:
    rng = np.random.default_rng(1)
    text = rng.bytes(24_000_000)
    (tmp_path / "text").write_bytes(text)
    folder = race_corpus.written(tmp_path / "text")
    assert (folder / "test.txt").read_bytes() == text[22_800_000:][: 1 << 20]


def test_splits_that_are_there_are_kept(tmp_path: Path, home: Path) -> None:
    source = tmp_path / "wiki"
    source.mkdir()
    (source / "wiki.train.tokens").write_bytes(b"train" * 100)
    (source / "valid.txt").write_bytes(b"valid")
    (source / "test.txt.xz").write_bytes(lzma.compress(b"x" * (1 << 20) + b"y"))
    folder = race_corpus.written(source)
    assert (folder / "train.txt").read_bytes() == b"train" * 100
    assert (folder / "valid.txt").read_bytes() == b"valid"
    assert (folder / "test.txt").read_bytes() == b"x" * (1 << 20)
    for options in ({"num_bytes": 10}, {"pattern": "*.py"}):
        with pytest.raises(UserError, match="used as they are: leave out --files and --bytes"):
            race_corpus.written(source, **options)
    (source / "own.test.py").write_bytes(b"test")
    with pytest.raises(UserError, match=r"has several files for test: own\.test\.py and test\.txt\.xz"):
        race_corpus.written(source)


@pytest.mark.parametrize(
    ("name", "complaint"), [("nowhere", "there is no file or folder"), ("empty", "has no files *.py")]
)
def test_no_text(tmp_path: Path, home: Path, name: str, complaint: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=complaint.replace("*", "[*]")):
        race_corpus.written(tmp_path / name)


def test_how_far_a_recipe_looks_back() -> None:
    far = {
        name: race.look_back(schema.read(RunConfig, recipes.load(name)).model)
        for name in ("gpt", "flagship", "txl-enwik8", "sha-rnn", "enwik8")
    }
    assert far == {"gpt": 1024, "flagship": 8192, "txl-enwik8": 512, "sha-rnn": 5000, "enwik8": 8192}


def test_a_model_must_say_how_far_it_looks_back() -> None:
    class Mine:
        width = 3

    with pytest.raises(UserError, match="how far back Mine can attend is not known"):
        race.look_back(Mine())


def test_stages_share_the_seconds_by_their_steps(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        'name = "own"\n[model]\narchitecture = "gpt"\n'
        "[[stage]]\nsteps = 300\nlearning_rate = 0.1\n[[stage]]\nsteps = 100\nlearning_rate = 0.1\n"
    )
    args = race._parser().parse_args(["own", "--seconds", "220"])
    stages = race._config(str(own), [], args).stage
    assert [stage.max_seconds for stage in stages] == [165, 55]
    assert [stage.steps for stage in stages] == [race.NO_END] * 2


@pytest.mark.parametrize(("block_length", "warm"), [(32, 64), (96, 96)])
def test_lanes_are_warmed_by_the_look_back_or_a_longer_block(block_length: int, warm: int) -> None:
    table = recipes.load("quickstart")
    table["model"]["span"]["limit"] = 64
    table["training"]["block_length"] = block_length
    assert race._readings(schema.read(RunConfig, table), 5000) == (
        race_protocol.streams(5000, race.LANES, warm),
        block_length,
    )


TINY = [
    *("--training.batch_size=8", "--training.block_length=16", "--training.log_every=5"),
    *("--training.precision=float32", "--training.compile=false", "--training.compile_warmup=1"),
    *("--model.num_layers=1", "--model.width=16", "--model.num_heads=2", "--model.inner_width=32"),
]


def run(tmp_path: Path, *words: str) -> int:
    source = tmp_path / "text.py"
    source.write_bytes(TEXT)
    options = ["--corpus", str(source), "--seconds", "0.5", "--device", "cpu", "--out", str(tmp_path / "out")]
    return race.main([*options, *words])


def test_a_race(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "quickstart", *TINY, "--stage.0.learning_rate=0.02", "--model.span.limit=64") == 0
    assert run(tmp_path, "gpt", *TINY, "--model.context=16", "--seed", "2") == 0
    printed = capsys.readouterr().out
    ours, plain = (json.loads(line) for line in printed.splitlines())
    assert (tmp_path / "out" / "race.jsonl").read_text() == printed
    assert [ours["name"], plain["name"]] == ["quickstart", "gpt"]
    assert [ours["seed"], plain["seed"]] == [1, 2]
    assert [ours["look_back"], plain["look_back"]] == [64, 16]
    assert [ours["scored_in"], plain["scored_in"]] == ["streams", "windows"]
    for line in (ours, plain):
        assert line["bytes"] == line["corpus"]["test_bytes"] == len(TEXT) - len(TEXT) * 95 // 100
        assert line["bits_per_byte"] == pytest.approx(line["nats"] / math.log(2) / line["bytes"])
        assert 0.5 <= line["seconds"] < 20.0
        assert line["tokens"] % (8 * 16) == 0
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
        assert line["environment"]["device"] == "cpu"
    assert ours["bits_per_byte"] < 7.9  # it has learned something
    assert ours["changed"]["model.span.limit"] == "64"
    assert ours["spans"]["limit"] == 64
    assert len(ours["spans"]["mean_of_layers"]) == 1
    assert "spans" not in plain
    assert (tmp_path / "out" / "gpt-seed2" / "metrics.jsonl").is_file()

    assert run(tmp_path, "quickstart", *TINY) == 1  # before it trains
    assert "quickstart-seed1 exists already" in capsys.readouterr().err


def test_weights_are_kept_for_eval(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert race.main(["gpt", "--weights"]) == 1
    assert "--weights needs --out" in capsys.readouterr().err
    assert run(tmp_path, "quickstart", *TINY, "--model.span.limit=64", "--weights") == 0
    capsys.readouterr()
    command = ["eval", str(tmp_path / "out" / "quickstart-seed1"), "--json", "--device", "cpu"]
    assert cli.main([*command, "--context-curve", "--contexts", "16", "--curve-tokens", "64"]) == 0
    assert [point["context"] for point in json.loads(capsys.readouterr().out)["context_curve"]] == [16, None]


def test_several_seeds_and_their_summary(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nats = iter([1.0, 2.0, 3.0, 6.0])
    trained = []

    def run_recipe(config: RunConfig, *_: Any, **__: Any) -> dict[str, Any]:
        trained.append((config.name, config.training.seed))
        facts = {"steps": 10, "tokens": 100, "seconds": 2.0, "peak_memory_bytes": 3 << 29, "parameters": 7}
        return {"name": config.name, "nats": next(nats), **facts}

    monkeypatch.setattr(race, "run_recipe", run_recipe)
    own = tmp_path / "own.toml"
    own.write_text(
        'name = "own"\n[model]\narchitecture = "gpt"\ncontext = 16\n[[stage]]\nsteps=5\nlearning_rate=0.1\n'
    )
    assert run(tmp_path, "quickstart", str(own), *TINY, "--seed", "3,1") == 0
    assert trained == [("quickstart", 3), ("own", 3), ("quickstart", 1), ("own", 1)]
    out, err = capsys.readouterr()
    *lines, last = out.splitlines()
    assert [(json.loads(line)["name"], json.loads(line)["seed"]) for line in lines] == trained
    assert (tmp_path / "out" / "summary.jsonl").read_text() == last + "\n"
    ours, other = json.loads(last)["summary"]
    bits = 1 / math.log(2) / (len(TEXT) - len(TEXT) * 95 // 100)
    assert [ours["name"], ours["seeds"], other["name"]] == ["quickstart", [3, 1], "own"]
    assert ours["mean"] == pytest.approx(2 * bits)
    assert ours["spread"] == pytest.approx(math.sqrt(2) * bits)  # of 1 and 3, divided by n - 1
    assert (other["best"], other["worst"]) == pytest.approx((2 * bits, 6 * bits))
    assert (ours["steps"], ours["tokens_per_second"], ours["peak_memory_bytes"]) == (10, 50, 3 << 29)
    assert err.count("after 10 steps, 50 tokens/s, 1.50 GiB") == 4


def test_part_valid_trains_on_the_same_bytes_and_has_no_test(tmp_path: Path, home: Path) -> None:
    (tmp_path / "text.py").write_bytes(TEXT)
    usual, screen = (race_corpus.written(tmp_path / "text.py", part=part) for part in ("test", "valid"))
    parts = [[(folder / f"{s}.txt").read_bytes() for s in race_corpus.SPLITS] for folder in (usual, screen)]
    train, valid, test = parts[0]
    half = len(valid) // 2
    assert parts[1] == [train, valid[:half], valid[half:]]
    assert test not in b"".join(parts[1])


def test_a_race_on_the_valid_part(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "gpt", *TINY, "--model.context=16", "--part", "valid") == 0
    line = json.loads(capsys.readouterr().out)
    assert line["part"] == "valid"
    assert line["bytes"] == -(-(len(TEXT) * 95 // 100 - len(TEXT) * 90 // 100) // 2)
    assert line["steps"] * 8 * 16 == line["tokens"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["gpt", "--seed", "1,two"], "--seed is a number or several with commas"),
        (["gpt", "--seed", "1,1"], "the seeds must be different"),
        (["gpt", "--seed", "-1"], "the seeds must be different, not negative"),
        (["gpt", "--seed", str(2**63)], "and below 2^63"),
        (["gpt", "--training.patience=2"], "--training.patience is set by the race"),
        (["gpt", "--training=x"], "'training' must be a table of options"),
        (["gpt", "quickstart", "--name=same"], "two entrants would write"),
        (["gpt", "--stage.0.steps=many"], "stage.0.steps"),
        (["gpt", "--training.seed=7"], "--training.seed is set by the race"),
        (["gpt", "--data.tokenizr=word"], "--data.tokenizr is set by the race"),
        (["gpt", "--stage.0.max-seconds=9"], "is set by the race"),
        (["gpt", "--model.context=9000"], "4,501 bytes must come before the scored part"),
        (["gpt", "--bytes", "-1"], "--bytes must be at least 1"),
        (["gpt", "--seconds", "0"], "--seconds must be a number above 0"),
        (["gpt", "--seconds", "nan"], "--seconds must be a number above 0"),
        (["gpt", "--seconds", "inf"], "--seconds must be a number above 0"),
        (["gpt", "--model.context", "64"], "options of recipes are written with '=', as in --model.context="),
        (["gpt", "--stage.0.steps=none", "--stage.0.epochs=2"], "has a stage of epochs"),
        (["gpt", "wikitext2-par-search"], "is a search"),
        (["gpt", "txl-wikitext-103"], "cutoffs"),
    ],
)
def test_mistakes_show_before_anybody_has_started(
    tmp_path: Path, home: Path, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, *words) == 1
    lines = capsys.readouterr().err.splitlines()
    assert complaint in lines[-1]
    assert not any("step" in line for line in lines[:-1])
    assert not [*tmp_path.glob("out/*")]


def test_a_recipe_may_be_patient_and_say_how_often_it_warms_up(tmp_path: Path, home: Path) -> None:
    table = recipes.load("gpt") | {"training": {"evaluate_every": 9, "patience": 3, "rehearsal": 1}}
    (tmp_path / "patient.toml").write_text(tomli_w.dumps(table))
    with pytest.warns(FutureWarning, match="rehearsal"):
        config = race._config(
            str(tmp_path / "patient.toml"), [], argparse.Namespace(seconds=1.0, device="cpu")
        )
    assert (config.training.patience, config.training.compile_warmup) == (0, 1)


def test_steps_share_the_time_and_may_be_given(tmp_path: Path, home: Path) -> None:
    assert run(tmp_path, "gpt", *TINY, "--model.context=16", "--stage.0.steps=5") == 0


def test_a_file_is_no_folder_for_results(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("precious")
    assert run(tmp_path, "gpt", *TINY) == 1
    assert "--out must be a folder" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "precious"


def test_a_damaged_archive_is_named(tmp_path: Path, home: Path) -> None:
    whole = lzma.compress(TEXT)
    for name, content in (("cut.xz", whole[: len(whole) // 2]), ("plain.xz", TEXT)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name} is damaged"):
            race_corpus.written(tmp_path / name, pattern="*", num_bytes=10**6)


def test_stopped_by_hand_it_says_so(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(race, "train", stopped)
    assert run(tmp_path, "gpt", *TINY, "--model.context=16") == 130
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == "race: stopped by SIGINT; the training in progress is lost"
    )


def test_stopped_outside_of_a_training_it_says_so(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(race_protocol, "nats", interrupted)
    assert run(tmp_path, "gpt", *TINY, "--model.context=16") == 130
    assert capsys.readouterr().err.splitlines()[-1] == "race: stopped; results that were not printed are lost"


@pytest.mark.parametrize("option", ["--corpus", "--out"])
def test_an_empty_name_is_not_the_folder_where_one_stands(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        race.main(["gpt", option, ""])
    assert f"argument {option}: the name is empty" in capsys.readouterr().err


def test_lanes_that_were_warmed_are_worth_one_long_reading() -> None:
    torch.manual_seed(1)
    model = build(AdaptiveSpanConfig(num_layers=1, width=16, num_heads=2, span=SpanConfig(limit=24)), 256)
    text = np.frombuffer(TEXT, dtype=np.uint8)

    def found(lanes: int, warm: int) -> float:
        return race_protocol.nats(
            race._reader(model.eval()),
            text[:500],
            text[500:900],
            race_protocol.streams(400, lanes, warm),
            batch_size=4,
            block_length=32,
            device=CPU,
        )

    assert found(7, 24) == pytest.approx(found(1, 24), rel=1e-6)
    assert found(7, 2) != pytest.approx(found(1, 24), rel=1e-6)


def test_the_digest_forgets_place_and_seed_only() -> None:
    table = recipes.load("gpt")

    def digest(**training: Any) -> str:
        changed = table | {"training": table["training"] | training}
        return race._digest(schema.read(RunConfig, changed))

    assert digest() == digest(seed=7) == digest(device="cpu")
    assert digest() != digest(batch_size=8)


@pytest.mark.parametrize("name", ["x-transformers-", "x-transformers-far", "x-transformers-1"])
def test_x_transformers_needs_a_context(
    tmp_path: Path, home: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, name) == 1
    assert f"'{name}' needs a context, as in x-transformers-1024" in capsys.readouterr().err


def test_x_transformers(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("x_transformers")
    monkeypatch.setattr(race_x_transformers, "TOKENS_A_STEP", 128)
    source = tmp_path / "text.py"
    source.write_bytes(TEXT)
    corpus = prepare(DataConfig(corpus=str(race_corpus.written(source))))
    found = race_x_transformers.run(16, corpus, seconds=0.5, seed=1, device=CPU, dim=32, depth=1, heads=2)
    assert found["name"] == "x-transformers-16"
    assert found["tokens"] % 128 == 0
    assert 0.5 <= found["seconds"] < 20.0
    assert found["nats"] / math.log(2) / len(corpus.splits["test"]) < 8.0
