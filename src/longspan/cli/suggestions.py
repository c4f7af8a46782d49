"""Which option was meant: other programs' names for the same thing, and typing mistakes."""

from __future__ import annotations

from collections.abc import Sequence

from longspan.errors import nearest

# Names that other programs use, for short options and for options of a recipe.
OTHER_NAMES = {
    "batch": "batch-size",
    "bs": "batch-size",
    "bsz": "batch-size",
    "clip": "clip-norm",
    "context": "block-length",
    "continue": "resume",
    "corpus": "data",
    "d-model": "width",
    "dataset": "data",
    "depth": "num-layers",
    "dim": "width",
    "folder": "out",
    "gpu": "device",
    "grad-clip": "clip-norm",
    "heads": "num-heads",
    "hidden-size": "width",
    "iters": "steps",
    "layers": "num-layers",
    "length": "tokens",
    "lr": "learning-rate",
    "max-len": "tokens",
    "max-length": "tokens",
    "max-new-tokens": "tokens",
    "max-steps": "steps",
    "n-heads": "num-heads",
    "n-layers": "num-layers",
    "num-samples": "samples",
    "num-tokens": "tokens",
    "output": "out",
    "output-dir": "out",
    "p": "top-p",
    "pretrained": "init",
    "restart": "resume",
    "seq-len": "block-length",
    "temp": "temperature",
    "text": "prompt",
    "topk": "top-k",
    "topp": "top-p",
    "wd": "weight-decay",
}


def same_meaning(name: str, known: Sequence[str]) -> str | None:
    """The option among `known` that other programs call `name`; None if there is none."""
    option = f"--{OTHER_NAMES.get(name, '')}"
    return option if option in known else None


def nearest_option(name: str, known: Sequence[str]) -> str:
    """A hint for a typing mistake. Names are compared without dashes, which all options share."""
    if len(name) < 4:  # too few letters to tell a mistake from another word
        return ""
    hint = nearest(name, [option.lstrip("-") for option in known])
    return hint.replace("mean '", "mean '--")
