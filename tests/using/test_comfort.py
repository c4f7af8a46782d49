"""Help with examples and values, --quiet, --verbose, --no-sample, --json, --dry-run, and odd terminals."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from longspan import recipes
from longspan.cli import COMMANDS, main
from longspan.cli.examples import EXAMPLES
from longspan.config import RunConfig
from longspan.config.reference import documented, of_config
from longspan.config.schema import read
from longspan.training.reporter import LiveReporter, PlainReporter, reporter_for
from tests.training.runs import small_table, write_text
from tests.using.test_cli import misuse
from tests.using.tiny import run_folder

SHORT = ["--stage.0.steps", "2", "--stage.1.steps", "1", "--training.log-every", "1"]
ACTIONS = ("list", "get", "add", "remove", "clean", "info")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(tomli_w.dumps(small_table(write_text(tmp_path))))
    return "small.toml"


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as leaving:
        main([*words, "--help"])
    assert leaving.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [[], *([c] for c in COMMANDS), *(["data", a] for a in ACTIONS)])
def test_every_help_has_an_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    example = help_of(capsys, *words).split("\nexample:\n  ")[1].strip()
    assert example == EXAMPLES[" ".join(["longspan", *words])]
    typed = shlex.split(example.partition(">")[0])[1:]
    assert typed[: len(words)] == words
    known = help_of(capsys, *(words or ["train"]))
    for word in typed:
        if word.startswith("--"):
            assert word in known


@pytest.mark.parametrize("name", ["quickstart", "sha-rnn", "wikitext2-par-search"])
def test_the_help_of_a_recipe_has_its_own_options_and_values(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read(RunConfig, recipes.load(name))
    shown = help_of(capsys, "search" if config.search else "train", name)
    assert f"of the architecture {config.architecture}" in shown
    assert f"; here: {config.training.batch_size})" in shown
    assert f"; here: {config.model.width})" in shown  # type: ignore[union-attr]
    listed = set(re.findall(r"^  --(\S*\.\S*)$", shown, re.MULTILINE))
    table = {option.name.replace("_", "-") for option in of_config(config) if "." in option.name}
    assert listed == table
    everything = {option.name.replace("_", "-") for option in documented(RunConfig)}
    assert {re.sub(r"^stage\.\d+", "stage.0", name) for name in listed} <= everything
    if name == "sha-rnn":
        assert "model.span.limit" not in listed
    else:
        assert "model.boom-width" not in listed


def test_quiet_prints_the_result_only(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe, *SHORT, "--quiet"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0] == "run folder     runs/small"
    assert all(line.startswith(("bits per byte", "run folder")) for line in lines)
    assert main(["train", recipe, *SHORT, "--no-sample", "--out", "other"]) == 0
    shown = capsys.readouterr().out
    assert "a sample:" not in shown
    assert "Learned spans" in shown
    assert "not allowed with" in misuse(capsys, "train", "--quiet", "--verbose")


def test_the_result_as_json(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe, *SHORT, "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["run"] == "runs/small"
    assert result["final"]["kind"] == "final"
    assert "step 1 of 3  loss" in err
    assert main(["train", "--resume", "runs/small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result


def test_a_dry_run_refuses_what_a_run_refuses(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", recipe, "--data.tokenizer.order", "first-seen"]
    for more in ([], ["--dry-run"]):
        assert main([*words, *more]) == 1
        last = capsys.readouterr().err.splitlines()[-1]
        assert last == "longspan: the byte tokenizer has a fixed order: drop order, or set it to frequency"


def test_a_dry_run_has_the_block_lengths_of_the_stages(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def facts(*words: str) -> dict[str, Any]:
        assert main(["train", recipe, "--dry-run", "--json", *words]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    whole = facts()
    half = facts("--stage.0.block-length", "12")
    assert half["tokens_per_step"] * 2 == whole["tokens_per_step"]
    # the blocks of the second stage are twice as long
    assert half["estimated_seconds"] == pytest.approx((25 + 2 * 18) * half["seconds_per_step"])


def test_a_dry_run_makes_no_files(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().rglob("*"))
    assert main(["train", recipe, "--dry-run", "--json", "--stage.1.max-seconds", "0.001"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main(["train", recipe, "--dry-run", "--stage.1.max-seconds", "0.001"]) == 0
    assert "(the time is limited), at most 43\n" in capsys.readouterr().out
    assert main(["train", recipe, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "steps          43\n" in shown
    added = [path for path in sorted(Path().rglob("*")) if path not in before]
    assert [path for path in added if path.is_file() and "compiled" not in path.parts] == []
    assert f"{facts['parameters']:,} parameters" in shown
    assert facts["steps"] == 43
    first = facts["estimated_seconds"] - 0.001
    assert 0 < first < 43 * facts["seconds_per_step"]
    assert "--dry-run is for a new run" in misuse(capsys, "train", "--resume", "x", "--dry-run")
    assert main(["train", recipe, *SHORT, "--quiet"]) == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_odd_terminals_lose_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert isinstance(reporter_for(Terminal()), LiveReporter)
    monkeypatch.setenv("FORCE_COLOR", "1")
    pipe = io.StringIO()
    with reporter_for(pipe) as shown:
        shown.log("step 1  loss 2.0")
    assert pipe.getvalue().endswith("  step 1  loss 2.0\n")
    assert isinstance(reporter_for(Terminal()), LiveReporter)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(reporter_for(Terminal()), PlainReporter)


def test_verbose_prints_metrics_above_the_status_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for verbose in (False, True):
        terminal = Terminal()
        with reporter_for(terminal, verbose=verbose) as shown:
            shown.log("step 1  loss 2.0")
        assert ("step 1  loss 2.0" in terminal.getvalue()) == verbose


def test_lists_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in found] == recipes.names()
    small = next(line for line in found if line["name"] == "enwik8-small")
    assert small["stages"][0]["steps"] == 150_000
    assert main(["recipes", "enwik8-small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == small

    file = tmp_path / "my.txt"
    file.write_text("some text\n" * 50)
    assert main(["data", "add", "mine", str(file)]) == 0
    capsys.readouterr()
    assert main(["data", "list", "--json"]) == 0
    listed = {line["name"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert listed["mine"]["where"] == str(file)
    assert main(["data", "info", "mine", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["vocabulary_size"], sum(split["bytes"] for split in info["splits"].values())) == (256, 500)

    run = run_folder(tmp_path / "run")
    assert main(["spans", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 30
