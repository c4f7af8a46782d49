"""The command line, through `main`: what it prints, and one line for every mistake."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longspan import __version__, recipes
from longspan.cli import COMMANDS, figures, generate, main
from longspan.data import Tokenizer
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.data.tokenizers.character import CharacterTokenizer
from longspan.data.tokenizers.word import WordTokenizer
from longspan.runs import RunFolder
from tests.using.tiny import run_folder, tiny_model

TEXT = "".join(f"line {n} of a small text, with a ß in it\n" for n in range(200))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    corpus = tmp_path / "text.txt"
    corpus.write_text(TEXT, encoding="utf-8")
    return run_folder(tmp_path / "run", corpus=str(corpus))


def complaint(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 1) -> str:
    """Run a command that must fail: nothing on stdout, one line on stderr, and this status."""
    capsys.readouterr()
    assert main([str(word) for word in argv]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("longspan: ")
    assert err.count("\n") == 1
    return err


def misuse(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The same for a mistake in the words of the command: status 2."""
    return complaint(capsys, *argv, status=2)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == shown
    assert all(f"\n    {command} " in shown for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])
    assert leaving.value.code == 0
    assert f"longspan {command}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"longspan {__version__}\n"


def test_unknown_words_are_answered_with_the_nearest_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown command 'trian'; did you mean 'train'?" in misuse(capsys, "trian")
    assert "unknown option '--verson'; did you mean '--version'?" in misuse(capsys, "--verson")
    assert "unknown option '--tempratur'; did you mean '--temperature'?" in misuse(
        capsys, "generate", "run", "--tempratur=1"
    )
    assert "unknown recipe 'enwik8-smal'; did you mean 'enwik8-small'?" in complaint(
        capsys, "recipes", "enwik8-smal"
    )
    assert "unexpected argument 'more'" in misuse(capsys, "spans", "run", "more")


def test_what_argparse_finds_wrong_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert "required: RUN (see 'longspan spans --help')" in misuse(capsys, "spans")
    assert "invalid int value: 'many'" in misuse(capsys, "generate", "run", "--tokens", "many")
    assert "unknown option '--temp'" in misuse(capsys, "generate", "run", "--temp", "1")  # no abbreviations


def test_dotted_options_are_for_commands_that_take_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown option '--model.width'" in misuse(capsys, "generate", "run", "--model.width", "8")


def test_options_of_a_recipe_are_dotted(capsys: pytest.CaptureFixture[str]) -> None:
    assert misuse(capsys, "train", "--model", "small") == (
        "longspan: unknown option '--model': options of a recipe are dotted, such as --model.architecture "
        "('longspan train --help' lists them)\n"
    )
    assert "such as --model.num-layers (" in misuse(capsys, "train", "--num-layers=4")
    assert "such as --model.span.limit (" in misuse(capsys, "eval", "run", "--limit", "4")
    assert "--data is empty" in misuse(capsys, "eval", "run", "--data", "")
    assert "dotted" not in misuse(capsys, "generate", "run", "--model", "small")
    assert "did you mean '--resume'?" in misuse(capsys, "train", "--resum", "x")


@pytest.mark.parametrize(
    ("problem", "words", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), ["train"], "micro_batches"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ["eval", "run"], "smaller --batch-size"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), ["generate", "run"], "a shorter prompt"),
        (MemoryError(), ["spans", "run"], "a machine with more memory"),
    ],
)
def test_too_little_memory(
    problem: Exception,
    words: list[str],
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: object) -> None:
        raise problem

    monkeypatch.setattr(COMMANDS[words[0]], "run", fail)
    shown = complaint(capsys, *words)
    assert shown.startswith("longspan: there is not enough memory: ")
    assert advice in shown


def test_other_failures_of_torch_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(COMMANDS["eval"], "run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["eval", "run"])


@pytest.mark.parametrize("command", ["eval", "generate", "spans"])
def test_run_folders_that_are_none(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"there is no run folder {tmp_path / 'nowhere'}" in complaint(
        capsys, command, tmp_path / "nowhere"
    )
    assert "is not a run folder" in complaint(capsys, command, tmp_path)


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_checkpoints_that_are_no_good(
    command: str, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.checkpoint("best")
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert str(path) in complaint(capsys, command, run.path)
    path.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    assert str(path) in complaint(capsys, command, run.path)
    path.unlink()
    hint = f'there is no checkpoint {path}; use --checkpoint last (in Python: which="last")\n'
    assert complaint(capsys, command, run.path).endswith(hint)
    assert main([command, str(run.path), "--checkpoint", "last"]) == 0
    run.checkpoint("last").unlink()
    nothing = f"the run has saved nothing yet; continue with 'longspan train --resume {run.path}'\n"
    assert complaint(capsys, command, run.path).endswith(nothing)
    assert complaint(capsys, command, run.path, "--checkpoint", "last").endswith(nothing)


def test_a_prompt_the_vocabulary_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "letters", CharacterTokenizer("abc"))
    message = complaint(capsys, "generate", run.path, "--prompt", "abcxyz")
    assert "does not have the characters 'x', 'y', 'z'" in message
    assert "a seed has at most 64 bits" in complaint(capsys, "generate", run.path, "--seed", 2**64)
    assert "top-k must be" in misuse(capsys, "generate", run.path, "--prompt", "a", "--top-k", "0")


def test_generate_prints_the_prompt_and_what_follows(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["generate", str(run.path), "--tokens", "30", "--seed", "1", "--top-k", "50", "--top-p", "0.9"]
    assert main([*argv, "--prompt", "ein Maß"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("ein Maß")
    monkeypatch.setattr(sys, "stdin", io.StringIO("ein Maß"))
    assert main([*argv, "--prompt", "-"]) == 0
    assert capsys.readouterr().out == shown


def test_eval_reports_figures_with_their_counts(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run.path), "--batch-size", "2", "--block-length=64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["split"], found["checkpoint"], found["protocol"]) == ("test", "best", "every-token")
    assert (found["batch_size"], found["block_length"], found["skipped"]) == (2, 64, 1)
    assert found["bytes"] == found["tokens"]
    assert found["bytes"] > found["characters"] > 0.9 * found["bytes"]
    assert found["bits_per_byte"] == pytest.approx(found["bits_per_token"])

    assert main(["eval", str(run.path), "--batch-size", "2", "--block-length=64"]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines()[2:])
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["bits per byte"] == f"{found['bits_per_byte']:.4f}"
    assert rows["bits per character"] == f"{found['bits_per_character']:.4f}"
    assert rows["perplexity per token"] == f"{found['perplexity']:,.3f}"
    assert rows["tokens scored"] == f"{found['tokens']:,}"
    assert rows["tokens skipped"] == "1 (the first token has no context)"


@pytest.mark.parametrize(
    ("tokenizer", "notes"),
    [
        (
            WordTokenizer(["<eos>", "line", "of", "a", "small", "<unk>"]),
            [
                "{unknown:,} of {tokens:,} tokens are <unk>: bits per byte counts their bytes, but not the "
                "bits to predict them"
            ],
        ),
        (
            ByteTokenizer(lowercase=True),
            ["the text is in lower case: bits per byte does not count the bits of upper case"],
        ),
        (ByteTokenizer(), []),
    ],
)
def test_eval_says_what_a_tokenizer_has_lost(
    tokenizer: Tokenizer, notes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "text.txt"
    corpus.write_text(TEXT, encoding="utf-8")
    run = run_folder(tmp_path / "run", tokenizer, corpus=str(corpus))
    assert main(["eval", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["eval", str(run.path)]) == 0
    out, err = capsys.readouterr()
    rows = [line.split("  ", 1) for line in out.splitlines()[2:]]
    assert [value.strip() for name, value in rows if name == "note"] == [n.format(**found) for n in notes]
    assert "has changed" not in err


def test_eval_warns_of_text_that_has_changed(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "text.txt"
    warning = (
        f"longspan: the text of {corpus} has changed since the run began: "
        "its test split may contain text that the model was trained on"
    )

    def said(*options: str) -> list[str]:
        assert main(["eval", str(run.path), "--max-tokens", "20", "--json", *options]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["tokens"] == 20
        return [line for line in err.splitlines() if "has changed" in line]

    assert said() == []
    corpus.write_text("one more line\n" + TEXT, encoding="utf-8")
    assert said() == [warning]
    assert said("--split", "train") == []
    assert said("--data", str(corpus)) == []  # somebody chose this text


def test_absurd_perplexities_are_short() -> None:
    shown = [figures.perplexity(value) for value in (1.5, 1234.5678, 3.08456e30, math.inf)]
    assert shown == ["1.500", "1,234.568", "3.08e+30", "inf"]


def test_eval_shows_absurd_perplexities_in_short(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run.path)]) == 0  # untrained: 8 bits for each byte of a word
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "perplexity per word" in line]
    assert re.fullmatch(r"perplexity per word +\d\.\d\de\+\d\d", line)


def test_eval_takes_other_text_and_other_settings(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(*options: str) -> dict[str, float]:
        assert main(["eval", str(run.path), "--json", *options]) == 0
        found: dict[str, float] = json.loads(capsys.readouterr().out)
        return found

    folder = tmp_path / "other"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text("0123456789\n" * 30)
    assert loss("--data", str(folder))["bytes"] == 329
    assert loss("--split", "train", "--max-tokens", "40")["tokens"] == 40
    sha = loss("--protocol", "sha-rnn", "--batch-size", "2")
    assert sha["divisor"] == sha["tokens"] + 2
    full, adaptive = loss("--model.span.memory", "full"), loss("--model.span.memory=adaptive")
    assert full["nats"] == pytest.approx(adaptive["nats"], rel=1e-5)


def test_eval_settings_that_are_wrong(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'every-token'?" in misuse(capsys, "eval", run.path, "--protocol", "every-toke")
    assert "'evaluation.batch_size' must be a whole number" in misuse(
        capsys, "eval", run.path, "--batch-size", "two"
    )
    assert "no split 'tset'; did you mean 'test'?" in misuse(capsys, "eval", run.path, "--split", "tset")
    assert "unknown key 'model.widht'; did you mean 'width'?" in misuse(
        capsys, "eval", run.path, "--model.widht", "8"
    )
    assert "'--model.width' needs a value" in misuse(capsys, "eval", run.path, "--model.width")
    assert "does not match" in complaint(capsys, "eval", run.path, "--model.width", "8")
    assert "no device 'gpu'" in complaint(capsys, "eval", run.path, "--device", "gpu")


def test_spans_are_shown_and_drawn(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["spans", str(run.path)]) == 0
    out = capsys.readouterr().out
    assert "head 1  head 2" in out
    assert out.endswith(f"picture: {run.path / 'spans.png'}\n")
    assert main(["spans", str(run.path), "--out", str(tmp_path / "pictures" / "mine.png")]) == 0
    assert (tmp_path / "pictures" / "mine.png").read_bytes() == (run.path / "spans.png").read_bytes()
    config = run.path / "config.toml"
    before = config.read_bytes()
    assert "must end in .png" in misuse(capsys, "spans", run.path, "--out", config)
    assert "exists already" in complaint(
        capsys, "spans", run.path, "--out", tmp_path / "pictures" / "mine.png"
    )
    assert config.read_bytes() == before
    assert str(config) in complaint(capsys, "spans", run.path, "--out", config / "below-a-file.png")


def test_recipes_are_listed_with_their_size_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name}: " in listed for name in recipes.names())
    assert "6.5M parameters, 150,000 steps on enwik8" in listed
    assert "38.5M parameters, 600,000 steps on enwik8" in listed
    assert "150,000 steps + 20,000 steps on enwik8" in listed
    assert "1,500 steps or 100 s on python" in listed
    assert "38.4M parameters, 900,000 steps on text8" in listed  # 28 symbols; bytes would make it 38.6M
    assert "\n  expected: 41M parameters, test 1.06 bits per byte\n  source: Dai et al., 2019 " in listed
    assert main(["recipes", "enwik8-small"]) == 0
    printed = capsys.readouterr().out
    assert printed == (Path(recipes.__file__).parent / "enwik8-small.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("tokenizer", "note"),
    [("byte", ""), ("bpe", ""), ("word", " (with a vocabulary of 256)")],
)
def test_the_size_of_a_recipe_whose_vocabulary_nobody_knows_says_so(
    tokenizer: str, note: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = recipes.load("enwik8-small")
    table["data"] = {"corpus": "python", "tokenizer": {"kind": tokenizer}}
    if tokenizer == "bpe":
        table["data"]["tokenizer"]["vocabulary_size"] = 10_000
    monkeypatch.setattr(recipes, "names", lambda: ["mine"])
    monkeypatch.setattr(recipes, "load", lambda name: table)
    assert main(["recipes"]) == 0
    millions = "11.5" if tokenizer == "bpe" else "6.5"
    assert f"  {millions}M parameters{note}, 150,000 steps on python\n" in capsys.readouterr().out


def test_an_interrupt_is_no_traceback(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "run", interrupted)
    assert main(["generate", str(run.path)]) == 130
    assert capsys.readouterr().err == "longspan: stopped\n"


def test_a_reader_that_leaves_is_no_traceback(run: RunFolder) -> None:
    """As `longspan generate ... | head -c 10`, where the pipe closes in the middle of the text."""
    command = [sys.executable, "-m", "longspan", "generate", str(run.path), "--tokens", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert len(process.stdout.read(10)) == 10
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_a_terminal_without_the_models_characters_gets_question_marks(run: RunFolder) -> None:
    command = [sys.executable, "-m", "longspan", "generate", str(run.path), "--tokens", "5", "--prompt", "ß"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert done.stdout.startswith(b"?")


def test_a_prompt_may_hold_any_bytes(run: RunFolder) -> None:
    command = [sys.executable, "-m", "longspan", "generate", str(run.path), "--tokens", "0", "--prompt", "-"]
    done = subprocess.run(command, capture_output=True, input=b"caf\xff", env=os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"caf?\n", b"")


def test_what_main_loads_is_what_was_saved(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """The likeliest text from the command line is the likeliest text of the model itself."""
    assert main(["generate", str(run.path), "--prompt", "a", "--tokens", "1", "--temperature", "0"]) == 0
    model = tiny_model()
    with torch.no_grad():
        log_probs_BTV, _ = model.log_probs(torch.tensor([[97]]), model.initial_state(1))
    likeliest = bytes([int(log_probs_BTV[0, -1].argmax())]).decode(errors="replace")
    assert capsys.readouterr().out == f"a{likeliest}\n"
