"""The benchmark scripts: what can be wrong with them before a GPU is there."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import compare_commits
import precision_curves
import recipe_speed
import shared_machine
from longspan.config import RunConfig, schema


@pytest.mark.parametrize("smoke", [False, True])
@pytest.mark.parametrize("case", compare_commits.CASES, ids=lambda case: case.name)
def test_cases_of_a_comparison_are_configurations(case: compare_commits.Case, smoke: bool) -> None:
    training = compare_commits._config(case, smoke).training
    if smoke:
        assert (training.batch_size, training.precision, training.compile) == (2, "float32", False)
    else:
        assert (training.batch_size, training.block_length) == (case.batch_size, case.block_length)
        precision, compiled = ("bf16", True) if case.device == "cuda" else ("float32", False)
        assert (training.precision, training.compile) == (precision, compiled)
        assert not training.block_jitter


@pytest.mark.parametrize("gigabytes", [1, 60, 110, 1000])
def test_cases_that_are_compiled_together_fit_into_the_memory(gigabytes: float) -> None:
    batches = compare_commits._batches(compare_commits.CASES, gigabytes)
    assert [case for batch in batches for case in batch] == compare_commits.CASES
    for batch in batches:
        assert len(batch) == 1 or 2 * sum(case.gigabytes for case in batch) <= gigabytes


def test_a_comparison_says_which_side_failed() -> None:
    case = compare_commits.CASES[0]
    good = compare_commits._result(case, {"old": [100.0, 110.0], "new": [90.0, 120.0]}, {})
    bad = compare_commits._result(case, {"old": [100.0], "new": []}, {"new": "out of memory"})
    assert good["ratio"] == pytest.approx(1.0)
    table = compare_commits._table([good, bad])
    assert "| enwik8-64x512 | 105 | 105 | 1.000 | 0.90 |" in table
    assert "failed: {'new': 'out of memory'}" in table


@pytest.mark.parametrize(
    ("module", "function"), [("bench_paths", "paths_for"), ("bench_paths", "ways_for"), ("ways", "ways_for")]
)
def test_a_comparison_finds_the_paths_of_older_trees(
    module: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tree(name: str) -> SimpleNamespace:
        if name != f"longspan.bench.{module}":
            raise ModuleNotFoundError(name)
        return SimpleNamespace(**{function: len})

    monkeypatch.setattr(compare_commits.importlib, "import_module", tree)
    assert compare_commits._paths_for() is len


@pytest.mark.parametrize("smoke", [False, True])
@pytest.mark.parametrize("model", precision_curves.MODELS)
def test_runs_of_curves_are_configurations(model: str, smoke: bool) -> None:
    args = argparse.Namespace(steps=2000, seed=3, data=Path("text.txt"), smoke=smoke)
    config = schema.read(RunConfig, precision_curves.recipe_of(model, args))
    (stage,) = config.stage
    assert (stage.steps, config.training.evaluate_every, config.training.seed) == (2000, 200, 3)
    assert stage.warmup_steps <= 500
    assert (config.training.precision, config.training.compile) == ("auto", "auto")


def test_a_table_of_curves_has_the_difference() -> None:
    runs = [
        {"model": "sha-rnn", "setting": setting, "steps": 2000, "valid_bits_per_byte": bits}
        for setting, bits in (("float32", 2.0), ("auto", 2.0125))
    ]
    assert "| sha-rnn | 2,000 | 2.0000 | 2.0125 | +0.0125 |" in precision_curves._table(runs, ["sha-rnn"])


def test_half_written_lines_are_not_read(tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": 50}, {"kind": "valid", "step": 50}, {"kind": "train", "step": 100}]
    text = "\n".join(map(json.dumps, lines))
    path = tmp_path / "metrics.jsonl"
    path.write_text(text[:-5])
    assert recipe_speed._lines(path) == lines[:1]
    path.write_text(text + "\n")
    assert recipe_speed._lines(path) == [lines[0], lines[2]]


def test_speed_of_a_training_is_all_its_tokens_over_all_its_seconds() -> None:
    lines = [
        {"kind": "train", "tokens": 100, "seconds": 1.0, "tokens_per_second": 100.0},
        {"kind": "train", "tokens": 600, "seconds": 4.0, "tokens_per_second": 166.0},
        {"kind": "valid", "tokens": 50, "seconds": 4.0},
        {"kind": "final"},
    ]
    assert shared_machine.speed([json.dumps(line) for line in lines]) == 150.0


def test_shares_of_a_shared_machine() -> None:
    rounds = [
        {"alone": [100.0], "two at once": [45.0, 60.0], "beside a busy process": [44.0]},
        {"alone": [90.0], "two at once": [70.0, 39.0], "beside a busy process": [30.0]},
        {"alone": [120.0], "two at once": [41.0, 80.0], "beside a busy process": [50.0]},
    ]
    report = shared_machine.summary(rounds)
    assert [one["tokens_per_second"] for one in report["cases"]] == [100.0, 41.0, 44.0]
    assert [one["share"] for one in report["cases"]] == pytest.approx([1.0, 0.41, 0.44])
    assert [one["reached"] for one in report["cases"]] == [True, True, False]
    assert shared_machine.table(report["cases"]).splitlines()[2:] == [
        "| alone | 100 | 100% |  |",
        "| two at once | 41 | 41% | 40% |",
        "| beside a busy process | 44 | 44% (missed) | 45% |",
    ]
