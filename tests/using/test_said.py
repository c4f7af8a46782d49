"""Choices that would otherwise be made without a word: two meanings of a name, options given twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from longspan.cli import main
from longspan.config import DataConfig, TokenizerConfig
from longspan.data import corpora, prepare
from longspan.kernels import compiler

TEXT = "".join(f"line {n} of a small text\n" for n in range(300))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) not in (0, None)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_a_corpus_does_not_hide_a_file_without_a_word(tmp_path, capsys):
    corpora.add("mine", tmp_path / "text.txt")
    assert main(["data", "get", "mine"]) == 0
    assert "warning" not in capsys.readouterr().err
    (tmp_path / "mine").write_text("other text\n" * 100)
    assert main(["data", "get", "mine"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("mine is ready: train 6")
    assert err == (
        "longspan: warning: 'mine' is taken as the corpus of that name, not as the file or folder: for that, "
        "give ./mine\n"
    )
    assert main(["data", "get", "./mine"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("mine is ready: train 1,001, valid 55, test 44 bytes\n", "")


def test_a_folder_named_as_a_built_in_corpus_is_said(tmp_path):
    (tmp_path / "python").mkdir()
    with pytest.warns(UserWarning, match=r"'python' is taken as the corpus of that name.*give ./python"):
        corpora.find("python", print)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--training.seed", "5", "--training.seed", "6"], "--training.seed is given twice"),
        (
            ["train", "--training.batch-size=5", "--training.batch_size", "6"],
            "--training.batch_size is given",
        ),
        (["train", "--data", "a", "--data", "b"], "--data is given twice"),
        (["train", "--data", "a", "--data=a"], "--data is given twice"),
        (["train", "--data", "a", "--data.corpus", "b"], "--data and --data.corpus are the same option"),
        (["train", "--binary", "--data.binary", "true"], "--binary and --data.binary are the same option"),
        (["generate", "run", "--tokens", "5", "--tokens", "6"], "--tokens is given twice"),
        (["eval", "run", "--json", "--json"], "--json is given twice"),
        (["eval", "run", "--model.dropout", "0", "--model.dropout", "0"], "--model.dropout is given twice"),
        (["data", "info", "x", "--tokenizer", "byte", "--tokenizer", "word"], "--tokenizer is given twice"),
    ],
)
def test_an_option_is_given_once(words, said, capsys):
    assert said in complaint(capsys, *words)
    assert not Path("runs").exists()


def test_plugins_may_be_several_and_values_may_look_alike(capsys):
    complained = complaint(capsys, "data", "info", "nothing", "--plugin", "json", "--plugin", "csv")
    assert "there is no corpus, file or folder 'nothing'" in complained
    assert "--prompt is given twice" not in complaint(capsys, "generate", "run", "--prompt=--prompt")


@pytest.mark.parametrize(("kind", "size"), [("word", 9000), ("bpe", 9000)])
def test_a_vocabulary_that_came_out_smaller_is_said(kind, size):
    config = DataConfig(corpus="text.txt", tokenizer=TokenizerConfig(kind=kind, vocabulary_size=size))
    for _ in range(2):  # when it is made, and when it is found
        with pytest.warns(
            UserWarning, match=rf"the {kind} vocabulary of text has [\d]+ tokens, not the 9,000"
        ):
            prepare(config)


def test_a_warm_up_longer_than_its_stage_is_said(capsys):
    small = ["--model.num-layers", "1", "--model.width", "16", "--model.num-heads", "2", "--out", "run"]
    quick = ["--stage.0.steps", "2", "--stage.0.warmup-steps", "5", "--training.batch-size", "2"]
    more = ["--training.block-length", "8", "--evaluation.batch-size", "2", "--data", "text.txt"]
    assert main(["train", "quickstart", *small, *quick, *more]) == 0
    err = capsys.readouterr().err
    assert "longspan: warning: the warm-up of stage 'train' is longer than the stage (5 of 2 steps)" in err


def test_a_missing_compiler_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setattr(compiler.platform, "system", lambda: "Linux")
    with pytest.warns(UserWarning, match=r"there is no C\+\+ compiler '.*no-such-compiler'.*install g\+\+"):
        assert compiler.compiled.__wrapped__(tmp_path / "source.cpp") is None
