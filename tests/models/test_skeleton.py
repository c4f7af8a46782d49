"""Models without weights: shapes as they would be, and torch does not import its compiler for them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from longspan import __main__, compiling, recipes
from longspan.config import RunConfig, schema
from longspan.models import build_run
from longspan.models.skeleton import skeletons

VOCABULARY = 64


@pytest.mark.parametrize("recipe", ["quickstart", "enwik8-pers-small"])
def test_shapes_are_those_of_the_model(recipe: str) -> None:
    config = schema.read(RunConfig, recipes.load(recipe))
    model = build_run(config, VOCABULARY)
    with skeletons():
        skeleton = build_run(config, VOCABULARY)
    assert all(tensor.is_meta for tensor in skeleton.state_dict().values())
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in skeleton.state_dict().items()} == shapes


def test_what_is_left_out_keeps_its_shape() -> None:
    with skeletons():
        drawn = torch.randn(3, 4) / 2.0
        filled = nn.init.normal_(tensor=torch.empty(5), std=2.0)
        assert nn.init.normal_(filled).normal_() is filled
        steps = torch.linspace(0, 1, steps=6)
        seeded = torch.randn(7, generator=torch.Generator())
        parts = nn.Parameter(torch.arange(8) / 8)
        broadcast = torch.ones(5).div(other=torch.ones(4, 1))
    assert (drawn.shape, filled.shape, drawn.is_meta) == ((3, 4), (5,), True)
    assert (steps.shape, seeded.shape, parts.shape, broadcast.shape) == ((6,), (7,), (8,), (4, 5))
    assert torch.randn(2).abs().sum() > 0


def test_the_compiler_is_not_imported_where_nothing_is_compiled() -> None:
    """It takes two seconds, and matplotlib half a second."""
    code = (
        "import sys; sys.argv = ['longspan', 'recipes']; from longspan.__main__ import main; main(); "
        "import longspan.language_model; "
        "print([name for name in ('torch._dynamo', 'matplotlib') if name in sys.modules]); import torch; "
        "print(torch.compile(lambda x: x + 1, backend='eager', fullgraph=True)(torch.ones(1)))"  # of a plugin
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-2:] == ["[]", "tensor([2.])"], done.stderr


@pytest.mark.parametrize(
    ("words", "compiles"),
    [
        ("train quickstart", True),
        ("--training.compile=true train", True),
        ("eval runs/a", False),
        ("", False),
    ],
)
def test_commands_that_train_may_compile(words: str, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "possible", True)
    monkeypatch.setattr(sys, "argv", ["longspan", *words.split()])
    monkeypatch.setattr("longspan.cli.main", lambda: 0)
    assert __main__.main() == 0
    assert compiling.possible == compiles
