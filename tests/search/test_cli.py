"""`longspan search` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w
from PIL import Image

from longspan.cli import main
from longspan.config import RunConfig
from longspan.inspection import read_architecture
from longspan.runs import RunFolder

from ..training.runs import metrics
from .searches import search_table

WRITTEN = ("architecture.png", "architecture.gif", "found.toml")


@pytest.fixture
def recipe(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe file in the folder where the user stands."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hunt.toml").write_text(tomli_w.dumps(search_table(text)))
    return "hunt.toml"


def patterns(shown: str) -> list[list[str]]:
    return [line.split()[1:] for line in shown.splitlines() if line.startswith("pattern ")]


def test_search_then_train_what_was_found(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", recipe, "--top", "3"]) == 0
    shown = capsys.readouterr().out
    run = Path("runs/hunt")
    final = metrics(run)[-1]
    assert patterns(shown)[0][0] == final["pattern"]
    probabilities = [float(words[-1]) for words in patterns(shown)]
    assert len(probabilities) == 3
    assert probabilities == sorted(probabilities, reverse=True)
    assert f"as {final['pattern']} (soft loss " in shown
    assert f"{final['test']['bits_per_byte']:.4f} on the test split" in shown
    assert f"{final['test']['loss']:.4f} as {final['pattern']} alone (hard, as all above)" in shown
    assert f"{final['test']['soft']['loss']:.4f} as the mixture (soft) on the test split" in shown
    assert "perplexity" not in shown  # of bytes

    # What was found is the same recipe with fixed blocks, and can be trained.
    searched = RunFolder.open(run).config
    found = RunConfig.from_toml((run / "found.toml").read_bytes(), "found.toml")
    assert (found.name, found.search, found.model.pattern) == ("hunt-found", None, final["pattern"])  # type: ignore[union-attr]
    assert (found.data, found.training, found.stage) == (searched.data, searched.training, searched.stage)
    assert main(["train", str(run / "found.toml"), "--stage.0.steps", "2", "--stage.1.steps", "1"]) == 0
    assert RunFolder.open(Path("runs/hunt-found")).final() is not None

    # A finished search is only shown again; what is missing is made again, what is there stays.
    capsys.readouterr()
    for name in WRITTEN[1:]:
        (run / name).unlink()
    (run / "architecture.png").write_text("mine")
    before = (run / "metrics.jsonl").read_bytes()
    assert main(["search", "--resume", str(run), "--top", "30"]) == 0
    assert len(patterns(capsys.readouterr().out)) == 27
    assert (run / "metrics.jsonl").read_bytes() == before
    assert (run / "architecture.png").read_text() == "mine"
    assert all((run / name).is_file() for name in WRITTEN)

    assert main(["search", "--resume", str(run), "--top", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [f"{one['pattern']} {one['probability']:.4f}" for one in told["patterns"]] == [
        f"{words[0]} {words[-1]}" for words in patterns(shown)
    ]
    assert (told["run"], told["final"]) == (str(run), final)

    assert main(["search", recipe, "--out", str(run)]) == 1
    assert f"continue with 'longspan search --resume {run}'" in capsys.readouterr().err

    # The same weights serve every command that takes a run.
    assert main(["eval", str(run), "--max-tokens", "50"]) == 0
    assert "every block is the mixture of its candidates (soft)" in capsys.readouterr().out
    assert main(["generate", str(run), "--tokens", "5"]) == 0


def test_the_animation_has_a_frame_for_every_moment(recipe: str) -> None:
    assert main(["search", recipe]) == 0
    run = RunFolder.open(Path("runs/hunt"))
    with Image.open(run.path / "architecture.gif") as animation:
        assert animation.n_frames == len(read_architecture(run).steps_N) == 6  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["search", "hunt.toml", "--top", "0"], "--top must be at least 1, not 0"),
        (["search", "hunt.toml", "--top", "few"], "--top: invalid int value: 'few'"),
        (["search", "quickstart"], "quickstart is not a search"),
        (["search", "--resume", "runs/none"], "there is no run folder runs/none"),
        (["search", "hunt.toml", "--search.candidates", "sfx"], "x"),
        (["search", "hunt.toml", "--search.num-blocks", "0"], "num_blocks"),
        (["search", "hunt.toml", "--model.pattern", "sf"], "leave out model.pattern or [search]"),
        (
            ["search", "hunt.toml", "--model.span.kind", "fixed", "--model.span.windows", "[[3, 5]]"],
            "leave out model.span.windows or [search]",
        ),
        (["train", "hunt.toml"], "hunt is a search (its configuration has [search]): use 'longspan search'"),
    ],
)
def test_mistakes_are_one_line(
    recipe: str, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found_later = ("quickstart is not", "there is no run folder", "hunt is a search")
    assert main(words) == (1 if complaint.startswith(found_later) else 2)
    complaints = capsys.readouterr().err.splitlines()
    assert len(complaints) == 1
    assert complaints[0].startswith("longspan: ")
    assert complaint in complaints[0]
    assert not Path("runs").exists()


def test_perplexity_of_words_stands_beside_bits_per_byte(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--stage.0.steps", "2", "--stage.1.steps", "1", "--search.num-blocks", "1"]
    assert main(["search", recipe, "--data.tokenizer.kind", "word", *quick]) == 0
    final = metrics(Path("runs/hunt"))[-1]["test"]
    per_token, per_word = f"{final['perplexity']:,.3f}", f"{final['perplexity_per_word']:,.3f}"
    shown = capsys.readouterr().out
    assert f"perplexity     {per_token} per token, {per_word} per word on the test split" in shown
