"""`longspan cutoffs` as a user types it, and cutoffs in recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longspan.cli import main
from longspan.config import AdaptiveSpanConfig, RunConfig, schema
from longspan.models import build
from longspan.output.cutoffs import ScoreCost, best_cutoffs

from .all_cutoffs import all_cutoffs, time_cost


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user stands: a text, and files of counts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("a b a c a b a d a a\n" * 300)
    (tmp_path / "counts.txt").write_text("".join(f"{1 + 1000 // rank}\n" for rank in range(1, 101)))
    (tmp_path / "wrong.txt").write_text("12\nthe 7\n")
    (tmp_path / "zeros.txt").write_text("0 0.0\n")
    (tmp_path / "negative.txt").write_text("0.5 -0.5\n")
    (tmp_path / "empty.txt").write_text("")
    return tmp_path


def table_in(shown: str) -> dict:
    """The part of the output that is meant for a recipe."""
    lines = shown.splitlines()
    start = lines.index("[model.vocabulary]")
    return schema.parse_toml("\n".join(lines[start : start + 2]).encode(), "output")


@pytest.mark.usefixtures("folder")
def test_the_words_of_a_text(capsys):
    assert main(["cutoffs", "mine.txt", "--clusters", "3"]) == 0
    shown = capsys.readouterr().out
    # 271 lines for training with 11 tokens each: a 6 times, b twice, c, d and <eos> once, <unk> never
    assert "6 words, 2,981 tokens" in shown
    assert table_in(shown) == {"model": {"vocabulary": {"cutoffs": [1, 3]}}}
    assert "expected cost: 1.636 scores per token, 27.27% of a plain softmax's 6.000" in shown
    assert "--model.vocabulary.cutoffs '[1, 3]'" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["2", "1", "2", "33.33%", "27.27%"] in rows


@pytest.mark.usefixtures("folder")
def test_what_it_prints_goes_into_a_recipe(capsys):
    assert main(["cutoffs", "--counts", "counts.txt", "--clusters", "3"]) == 0
    shown = capsys.readouterr().out
    config = schema.read(RunConfig, table_in(shown))
    option = shown.splitlines()[-1].split("--model.vocabulary.cutoffs ")[1].strip("'")
    table: dict = {}
    schema.override(table, "model.vocabulary.cutoffs", option)
    assert schema.read(RunConfig, table) == config
    assert isinstance(config.model, AdaptiveSpanConfig)
    counts = [1 + 1000 // rank for rank in range(1, 101)]
    assert config.model.vocabulary.cutoffs == best_cutoffs(ScoreCost(counts, 3))
    with torch.device("meta"):
        assert build(config.model, 100).head.bounds == [0, *config.model.vocabulary.cutoffs, 100]


@pytest.mark.parametrize("separator", [" ", "\n", " \n\t"])
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e30])
def test_probabilities_give_the_cutoffs_of_their_counts(separator, scale, folder, capsys):
    counts = [1 + 1000 // rank for rank in range(1, 101)]
    (folder / "unigrams.txt").write_text(separator.join(repr(scale * c / sum(counts)) for c in counts))
    assert main(["cutoffs", "--unigrams", "unigrams.txt", "--clusters", "4"]) == 0
    shown = capsys.readouterr().out
    assert main(["cutoffs", "--counts", "counts.txt", "--clusters", "4"]) == 0
    of_counts = capsys.readouterr().out
    assert table_in(shown) == table_in(of_counts)
    assert shown.splitlines()[0] == "100 words"
    assert shown.splitlines()[1:] == of_counts.splitlines()[1:]  # also costs and shares


@pytest.mark.usefixtures("folder")
def test_the_time_with_given_constants(capsys):
    words = ["cutoffs", "--counts", "counts.txt", "--clusters", "3", "--cost", "time", "--tokens", "10"]
    assert main([*words, "--constants", "1e-3,1e-6,150"]) == 0
    shown = capsys.readouterr().out
    counts = [1 + 1000 // rank for rank in range(1, 101)]
    cuts = min(all_cutoffs(100, 3), key=lambda cuts: time_cost(counts, cuts, 15))
    assert table_in(shown)["model"]["vocabulary"]["cutoffs"] == list(cuts)
    adaptive = 3 * 1.0 + 1e-3 * 10 * time_cost(counts, cuts, 15) / sum(counts)
    assert f"expected cost: {adaptive:.3f} ms per 10 tokens" in shown
    assert "of a plain softmax's 2.000" in shown


@pytest.mark.usefixtures("folder")
def test_where_no_product_is_large_enough_all_cost_the_same(capsys):
    words = ["cutoffs", "--counts", "counts.txt", "--clusters", "4", "--cost", "time", "--tokens", "10"]
    assert main([*words, "--constants", "0,1e-6,5e6"]) == 0
    shown = capsys.readouterr().out
    assert table_in(shown)["model"]["vocabulary"]["cutoffs"] == [1, 2, 3]
    assert "20,000.000 ms per 10 tokens, 400.00% of a plain softmax's 5,000.000" in shown


@pytest.mark.usefixtures("folder", "quick_measurement")
def test_measured_constants_are_told_and_can_be_given_again(capsys):
    words = ["cutoffs", "--counts", "counts.txt", "--clusters", "3", "--cost", "time"]
    assert main([*words, "--width", "16", "--device", "cpu"]) == 0
    first = capsys.readouterr()
    constants = first.err.split("--constants ")[1].split()[0]
    assert main([*words, "--constants", constants]) == 0
    assert table_in(capsys.readouterr().out) == table_in(first.out)


@pytest.mark.usefixtures("folder")
def test_an_order_that_is_not_by_frequency_is_told(capsys):
    assert main(["cutoffs", "mine.txt", "--clusters", "2", "--tokenizer", "byte"]) == 0
    assert "note: the vocabulary is not sorted by frequency" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["mine.txt", "--clusters", "7"], "a vocabulary of 6 cannot be split into 7 clusters: use fewer"),
        (["mine.txt", "--clusters", "0"], "a vocabulary cannot be split into 0 clusters: use 1 or more"),
        (["mine.txt", "--clusters", "two"], "invalid int value: 'two'"),
        (["mine.txt"], "the following arguments are required: --clusters"),
        (["nowhere", "--clusters", "2"], "there is no corpus, file or folder 'nowhere'"),
        (["--clusters", "2"], "give either a corpus or --counts FILE or --unigrams FILE"),
        (["mine.txt", "--counts", "counts.txt", "--clusters", "2"], "give either a corpus or --counts FILE"),
        (["--counts", "missing.txt", "--clusters", "2"], "there is no file missing.txt: give --counts"),
        (["--counts", ".", "--clusters", "2"], ". is a folder: give --counts a file"),
        (["--counts", "counts.txt", "--clusters", "2", "--order", "frequency"], "--order has no effect"),
        (["--counts", "counts.txt", "--clusters", "2", "--lowercase"], "--lowercase has no effect"),
        (["--counts", "counts.txt", "--clusters", "2", "--tokenizer", "word"], "--tokenizer has no effect"),
        (
            ["--counts", "counts.txt", "--clusters", "2", "--vocabulary-size", "0"],
            "--vocabulary-size has no effect with --counts",
        ),
        (["--counts", "empty.txt", "--clusters", "2"], "empty.txt is empty: it must hold one count per line"),
        (["--counts", "wrong.txt", "--clusters", "2"], "wrong.txt, line 2: 'the 7' is not a count"),
        (["--unigrams", "empty.txt", "--clusters", "2"], "empty.txt is empty: it must hold the probability"),
        (["--unigrams", "wrong.txt", "--clusters", "2"], "wrong.txt, entry 2: 'the' is not a probability"),
        (
            ["--unigrams", "negative.txt", "--clusters", "2"],
            "negative.txt, entry 2: '-0.5' is not a probability",
        ),
        (
            ["--unigrams", "zeros.txt", "--clusters", "2"],
            "zeros.txt add up to 0: at least one must be above 0",
        ),
        (["--unigrams", "missing.txt", "--clusters", "2"], "there is no file missing.txt: give --unigrams"),
        (["--unigrams", "counts.txt", "--clusters", "0"], "a vocabulary cannot be split into 0 clusters"),
        (["--unigrams", "counts.txt", "--clusters", "2", "--lowercase"], "no effect with --unigrams"),
        (
            ["--unigrams", "counts.txt", "--counts", "counts.txt", "--clusters", "2"],
            "give either a corpus or",
        ),
        (["mine.txt", "--clusters", "2", "--width", "9"], "--width has no effect without --cost time"),
        (["mine.txt", "--clusters", "2", "--cost", "time", "--tokens", "0"], "--tokens must be at least 1"),
        (["mine.txt", "--clusters", "2", "--cost", "time", "--constants", "1,0,1"], "the second above 0"),
        (["mine.txt", "--clusters", "2", "--cost", "time", "--constants", "1,2"], "must be three numbers"),
        (
            ["mine.txt", "--clusters", "2", "--cost", "time", "--constants", "1,2,3", "--width", "9"],
            "with --constants nothing is measured",
        ),
    ],
)
@pytest.mark.usefixtures("folder")
def test_mistakes_are_one_line(words, complaint, capsys):
    of_a_file = ("a vocabulary", "there is no", ". is a folder", "empty", "wrong", "negative", "zeros")
    assert main(["cutoffs", *words]) == (1 if complaint.startswith(of_a_file) else 2)
    shown = capsys.readouterr()
    assert shown.out == ""
    last = shown.err.splitlines()[-1]
    assert last.startswith("longspan: ")
    assert complaint in last


@pytest.mark.parametrize("architecture", ["adaptive-span", "all-attention", "transformer-xl"])
@pytest.mark.parametrize(
    ("cutoffs", "complaint"),
    [
        ("[5, 300]", "cutoffs 5, 300 do not fit a vocabulary of 256"),
        ("[256]", "cutoffs 256 do not fit a vocabulary of 256"),
        ("[9, 5]", "cutoffs must be above 0 and increase, not 9, 5"),
        ("[5, 5]", "cutoffs must be above 0 and increase, not 5, 5"),
        ("[0, 5]", "cutoffs must be above 0 and increase, not 0, 5"),
    ],
)
def test_cutoffs_of_a_recipe_that_make_no_sense(architecture, cutoffs, complaint, folder, capsys):
    table = {
        "data": {"corpus": "mine.txt"},
        "model": {"architecture": architecture, "width": 16, "num_layers": 1},
        "training": {"batch_size": 2, "block_length": 8},
        "stage": [{"steps": 1, "learning_rate": 0.1}],
    }
    (folder / "recipe.toml").write_text(schema.format_toml(table))
    assert main(["train", "recipe.toml", "--model.vocabulary.cutoffs", cutoffs]) == (
        2 if "increase" in complaint else 1
    )
    shown = capsys.readouterr()
    last = shown.err.splitlines()[-1]
    assert last.startswith("longspan: ")
    assert complaint in last
    assert not (folder / "runs").exists()
