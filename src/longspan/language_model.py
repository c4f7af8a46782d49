"""A trained model together with its tokenizer, from a run folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from longspan.config import RunConfig, schema
from longspan.config.overrides import override_all
from longspan.data import Tokenizer
from longspan.errors import UserError
from longspan.generation import generate
from longspan.models import LanguageModel, build_run
from longspan.runs import RunFolder, checkpoint, pick_device
from longspan.runs.check_weights import check_weights


@dataclass(frozen=True)
class LoadedModel:
    """Everything one needs to use a trained model; made by `load`."""

    model: LanguageModel
    tokenizer: Tokenizer
    config: RunConfig
    device: torch.device
    path: Path  # the run folder

    def generate(
        self,
        prompt: str = "",
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> str:
        """How the text might go on after `prompt`; the prompt itself is not repeated."""
        return "".join(self.stream(prompt, tokens, temperature, top_k, top_p, seed))

    def stream(
        self,
        prompt: str = "",
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> Iterator[str]:
        """The same text piece by piece, each as soon as its characters are complete.

        Without a prompt the model starts as if at the beginning of a line.
        """
        prompt_ids = self._prompt_ids(prompt)
        generator = _generator(seed)
        text = self.tokenizer.stream()
        for token in prompt_ids:  # what follows depends on it: a blank between two words, half a character
            text.push(token)
        for token in generate(
            self.model,
            prompt_ids,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            generator=generator,
        ):
            yield text.push(token)
        yield text.flush()

    def _prompt_ids(self, prompt: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(prompt).tolist() if prompt else []
        if ids:
            return ids
        try:
            ids = self.tokenizer.encode("\n").tolist()
        except UserError:  # a vocabulary without line ends
            ids = []
        return ids or [0]


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    elif not -(2**63) <= seed < 2**64:
        raise UserError(f"a seed has at most 64 bits: {seed} is too large")
    else:
        generator.manual_seed(seed)
    return generator


def load(
    run: str | os.PathLike[str],
    which: Literal["best", "last"] = "best",
    device: str = "auto",
    overrides: Mapping[str, str | int | float | bool] | None = None,
) -> LoadedModel:
    """The model of a run folder, ready to evaluate and generate.

    `overrides` change options of the run by their dotted names, such as `{"model.span.memory": "full"}`.
    """
    folder = RunFolder.open(Path(run))
    config = _overridden(folder.config, overrides or {})
    tokenizer = folder.tokenizer()
    path = _checkpoint(folder, which)
    weights = checkpoint.load(path).below("model")
    model = build_run(config, tokenizer.vocabulary_size)
    check_weights(model, weights, path)
    model.load_state_dict(weights)
    target = pick_device(device)
    return LoadedModel(model.to(target).eval(), tokenizer, config, target, folder.path)


def _checkpoint(folder: RunFolder, which: Literal["best", "last"]) -> Path:
    path = folder.checkpoint(which)
    other: Literal["best", "last"] = "last" if which == "best" else "best"
    if path.is_file():
        return path
    if folder.checkpoint(other).is_file():
        raise UserError(
            f'there is no checkpoint {path}; use --checkpoint {other} (in Python: which="{other}")'
        )
    raise UserError(
        f"there is no checkpoint {path}: the run has saved nothing yet; go on with '{folder.resume_command}'"
    )


def _overridden(config: RunConfig, overrides: Mapping[str, str | int | float | bool]) -> RunConfig:
    table = schema.write(config)
    override_all(table, overrides)
    return schema.read(RunConfig, table)
