"""Loading a run folder, and using what was loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import longspan
from longspan.data import Tokenizer
from longspan.data.tokenizers.character import CharacterTokenizer
from longspan.data.tokenizers.word import WordTokenizer
from longspan.errors import UserError
from longspan.runs import RunFolder, checkpoint
from tests.using.tiny import run_folder, tiny_model


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return run_folder(tmp_path / "run")


def test_the_weights_of_the_run_come_back(run: RunFolder) -> None:
    lm = longspan.load(run.path, device="cpu")
    expected = tiny_model().state_dict()
    assert lm.model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in lm.model.state_dict().items())
    assert not lm.model.training
    assert lm.config == run.config
    tokens = torch.tensor([[1, 2, 3]])
    log_probs_BTV, state = lm.model.log_probs(tokens, lm.model.initial_state(1))
    assert log_probs_BTV.shape == (1, 3, 256)
    assert state.flatten()


def test_best_and_last_are_different_files(run: RunFolder) -> None:
    model = tiny_model()
    tensors = {f"model.{name}": torch.zeros_like(t) for name, t in model.state_dict().items()}
    checkpoint.save(run.checkpoint("last"), tensors, {})
    assert longspan.load(run.path).model.head.scores.weight.abs().sum() > 0
    assert longspan.load(str(run.path), "last").model.head.scores.weight.abs().sum() == 0


def test_overrides_change_the_runs_options(run: RunFolder) -> None:
    lm = longspan.load(run.path, overrides={"model.span.memory": "full", "evaluation.batch-size": 3})
    assert lm.config.model.span.memory == "full"
    assert lm.config.evaluation.batch_size == 3
    with pytest.raises(UserError, match=r"unknown key 'model\.span\.memry'; did you mean 'memory'\?"):
        longspan.load(run.path, overrides={"model.span.memry": "full"})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensors: tensors.pop("model.head.scores.bias"), "it has no tensor 'head.scores.bias'"),
        (lambda tensors: tensors.update({"model.extra": torch.zeros(1)}), "no tensor 'extra'"),
        (
            lambda tensors: tensors.update({"model.head.scores.bias": torch.zeros(7)}),
            r"'head.scores.bias' has shape \[7\] where the model has \[256\]",
        ),
    ],
)
def test_weights_that_do_not_fit(run: RunFolder, change: object, complaint: str) -> None:
    assert callable(change)
    tensors = {f"model.{name}": tensor for name, tensor in tiny_model().state_dict().items()}
    change(tensors)
    checkpoint.save(run.checkpoint("best"), tensors, {})
    with pytest.raises(UserError, match=complaint):
        longspan.load(run.path)


def test_text_comes_in_pieces_and_a_seed_decides_it(run: RunFolder) -> None:
    lm = longspan.load(run.path)
    text = lm.generate("def main(", tokens=50, seed=3)
    assert text == "".join(lm.stream("def main(", tokens=50, seed=3))
    assert text != lm.generate("def main(", tokens=50, seed=4)
    assert lm.generate("a", tokens=20, seed=None) != lm.generate("a", tokens=20, seed=None)
    assert lm.generate("a", tokens=0) == ""


def test_without_a_prompt_a_text_begins_like_a_line(run: RunFolder) -> None:
    lm = longspan.load(run.path)
    assert lm.generate(tokens=20, temperature=0) == lm.generate("\n", tokens=20, temperature=0)


def test_a_vocabulary_without_newlines_begins_with_its_first_token(tmp_path: Path) -> None:
    lm = longspan.load(run_folder(tmp_path / "run", CharacterTokenizer("abcdefgh")).path)
    assert lm.generate("", tokens=9, temperature=0) == lm.generate("a", tokens=9, temperature=0)


@pytest.mark.parametrize(
    "tokenizer", [WordTokenizer(["<eos>", "a", "b", "<unk>"]), CharacterTokenizer("aß€")]
)
def test_prompt_and_text_fit_together(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The blank between the prompt's last word and the first new one belongs to the new text."""
    lm = longspan.load(run_folder(tmp_path / "run", tokenizer).path)
    ids = tokenizer.encode("a").tolist()
    text = lm.generate("a", tokens=12, seed=0)
    whole = tokenizer.encode("a" + text)
    assert len(whole) == len(ids) + 12
    assert tokenizer.decode(whole) == "a" + text


def test_a_prompt_the_vocabulary_cannot_say(tmp_path: Path) -> None:
    lm = longspan.load(run_folder(tmp_path / "run", CharacterTokenizer("abc")).path)
    with pytest.raises(UserError, match="does not have the characters 'x', 'y'"):
        lm.generate("abxy")


def test_importing_the_package_does_not_import_torch() -> None:
    check = "import longspan, longspan.cli, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        longspan.lode  # noqa: B018
