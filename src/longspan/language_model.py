"""A trained model together with its tokenizer, from a run folder."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.config import RunConfig, schema
from longspan.config.overrides import override_all
from longspan.data import Tokenizer
from longspan.data.tokenizers.vocabulary import UNKNOWN
from longspan.errors import UserError, usage_errors
from longspan.generation import check_sampling, sample_from
from longspan.inspection.attention import LayerAttention, attention
from longspan.inspection.attention_by_distance import MeanAttention, mean_attention
from longspan.inspection.display import MOST_TOKENS, Spans, facts_html, text_html
from longspan.inspection.token_spans import token_spans
from longspan.models import LanguageModel, build_run
from longspan.reading import Progress, TextState, begin, blocks, nats_of, read
from longspan.registry import load_plugins
from longspan.runs import RunFolder, checkpoint, pick_device
from longspan.runs.load_weights import load_weights
from longspan.stop_strings import StopStrings

_SHOWN = 50  # tokens of a prompt in a warning


class GeneratedText(str):
    """A generated text: a string that also knows its tokens and the state after them."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # of each token, as the model predicts it: without temperature or filters
    stop: str | None  # the stop string that ended it, which is not part of the text; its tokens are in `ids`
    _make_state: Callable[[], TextState]

    @cached_property
    def state(self) -> TextState:
        """The state after this text, to continue from; computed on first use."""
        return self._make_state()


@dataclass(frozen=True)
class TextScore:
    """The nats of a text, token by token."""

    ids: tuple[int, ...]
    pieces: tuple[bytes, ...]  # the text of each token
    token_nats: tuple[float, ...]  # of each token: minus the logarithm of its probability
    bytes: int | None  # of the whole text, in UTF-8; None if tokens are numbers of an unknown text
    state: TextState  # after the text

    @property
    def nats(self) -> float:
        """Of the whole text."""
        return math.fsum(self.token_nats)

    @property
    def bits_per_byte(self) -> float:
        """Not a number (nan) for a text without bytes, or if only tokens are known."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    def _about(self) -> str:
        size = "" if self.bytes is None else f", {self.bytes:,} bytes, {self.bits_per_byte:.4f} bits per byte"
        return f"{len(self.ids):,} tokens{size}"

    def __repr__(self) -> str:
        return f"<TextScore: {self._about()}>"  # short, also for a long text

    def _repr_html_(self) -> str:
        bits = [nats / math.log(2) for nats in self.token_nats[:MOST_TOKENS]]
        return text_html(self.pieces, bits, self._about())


@dataclass(frozen=True)
class LoadedModel:
    """A trained model with its tokenizer; made by `load`.

    A `state` comes from `read`, or from the results of `score` and `generate`. Without a state, a text starts
    at its beginning. `score`, and `generate` without a prompt, need a token before the first one: it is a
    line end. Every text is tokenized on its own: a word that is split between a state and the text after it
    gets the tokens of two words.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    config: RunConfig
    device: torch.device
    path: Path  # the run folder

    def read(
        self,
        text: str | Iterable[str],
        state: TextState | None = None,
        *,
        progress: Progress | None = None,
    ) -> TextState:
        """The state after a text of any length, or after many pieces of text one after the other.

        `progress(done, total)` gets the number of tokens of the current piece.
        """
        self._check_state(state)
        for piece in [text] if isinstance(text, str) or not isinstance(text, Iterable) else text:
            ids = self._encode(piece)
            if state is None and len(ids):
                state = begin(self.model, ids, progress)
            elif state is not None:
                state = read(self.model, ids, state, progress=progress)
        return self._at_line_start() if state is None else state

    def score(self, text: str, state: TextState | None = None) -> TextScore:
        """The nats of every token of a text."""
        ids = self._encode(text).tolist()
        nats, after = nats_of(self.model, ids, self._check_state(state) or self._at_line_start())
        pieces = self.tokenizer.pieces()
        size = len(text.encode("utf-8", "surrogateescape")) if self.tokenizer.knows_text else None
        return TextScore(tuple(ids), tuple(pieces[token] for token in ids), tuple(nats), size, after)

    def hidden(self, text: str, state: TextState | None = None) -> Tensor:
        """The hidden state at every token, [T, D]: what the head predicts the next token from."""
        found = [
            hidden_TD for hidden_TD, _ in blocks(self.model, self._encode(text), self._check_state(state))
        ]
        return torch.cat(found or [self._at_line_start().hidden_D[None][:0]])

    def attention(self, text: str, state: TextState | None = None) -> list[LayerAttention]:
        """The attention weights of every layer, head and token; they are large for a long text.

        Each layer has `weights_HTW` by distance, their mean distance `mean_distance_H`, and `reach_H`, the
        distance within which 90 per cent of the weight lies. Empty for a model without attention.
        """
        return attention(self.model, self._encode(text), self._check_state(state))

    def mean_attention(self, text: str, state: TextState | None = None) -> MeanAttention:
        """The mean attention weight of every layer and head over the distance, for a text of any length.

        The result has `weights_LHW` by distance, `persistent_LH`, `mean_distance_LH` and `reach_LH`;
        `longspan.inspection.draw_attention` draws it. A model without attention is an error.
        """
        return mean_attention(self.model, self._encode(text), self._check_state(state))

    def spans(self) -> Spans | None:
        """How many tokens each head of each layer looks back; None if the model has no learned spans.

        A list of lists, which a notebook draws. For dynamic spans the mean over the last block in training;
        `token_spans` has those over a text.
        """
        record = self.model.records().get("spans", {})
        return Spans(record["spans"], record.get("limit", 0)) if "spans" in record else None

    def token_spans(self, text: str, state: TextState | None = None) -> Tensor:
        """How many tokens each head looks back at every token of a text, the ramp included, [L, H, T]."""
        return token_spans(self.model, self._encode(text), self._check_state(state))

    def generate(
        self,
        prompt: str = "",
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        state: TextState | None = None,
        *,
        stop: Sequence[str] = (),
        repetition_penalty: float = 1.0,
        progress: Progress | None = None,
    ) -> GeneratedText:
        """A continuation of the text after `state` and `prompt`; the prompt itself is not repeated.

        It ends before the first of the strings in `stop`. `repetition_penalty` multiplies the log-probability
        of every token that was generated before: above 1 there are fewer repetitions.
        `progress(done, total)` is called after every token.
        Returns a string; its `state` is the state after it, its `log_probs` are those of its tokens.
        """
        check_sampling(tokens, temperature, top_k, top_p, repetition_penalty)
        start, drawn, end = self._start(prompt, state), list[tuple[int, float]](), StopStrings(stop)
        pieces = self._continue(
            start, drawn, end, tokens, temperature, top_k, top_p, repetition_penalty, seeded_generator(seed)
        )
        parts = []
        for piece in pieces:
            parts.append(piece)
            if progress is not None:
                progress(len(drawn), tokens)
        text = GeneratedText("".join(parts))
        text.ids, text.log_probs = tuple(token for token, _ in drawn), tuple(prob for _, prob in drawn)
        text.stop = end.found
        # Read token by token, as it was generated, unless the model is block invariant.
        length = None if self.model.block_invariant else 1
        text._make_state = lambda: read(self.model, text.ids, start, length)
        return text

    def stream(
        self,
        prompt: str = "",
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        state: TextState | None = None,
        *,
        stop: Sequence[str] = (),
        repetition_penalty: float = 1.0,
    ) -> Iterator[str]:
        """The same text piece by piece, each as soon as its characters are complete."""
        check_sampling(tokens, temperature, top_k, top_p, repetition_penalty)
        end, generator = StopStrings(stop), seeded_generator(seed)
        start = self._start(prompt, state)
        yield from self._continue(
            start, [], end, tokens, temperature, top_k, top_p, repetition_penalty, generator
        )

    def warn_of_unknown(self, prompt: str) -> None:
        """Show a prompt as the model reads it if some words are not in the vocabulary, as `generate` does."""
        ids, unknown_id = self._encode(prompt), self.tokenizer.unknown_id
        unknown = 0 if unknown_id is None else int((ids == unknown_id).sum())
        if unknown > prompt.count(UNKNOWN):
            shown = self.tokenizer.decode(ids[:_SHOWN]) + (" ..." if len(ids) > _SHOWN else "")
            warnings.warn(
                f"{unknown} of the {len(ids)} tokens of the prompt are not in the vocabulary: it is read as "
                f"{shown.strip()!r}",
                stacklevel=4,
            )

    def __repr__(self) -> str:
        return f"LoadedModel('{self.path}')"

    def _repr_html_(self) -> str:
        spans, vocabulary = self.spans(), self.tokenizer.vocabulary_size
        size = sum(parameter.numel() for parameter in self.model.parameters())
        facts = [
            ("run", str(self.path)),
            ("architecture", self.config.architecture),
            ("parameters", f"{size:,}"),
            ("tokenizer", f"{self.tokenizer.kind}, vocabulary {vocabulary:,}"),
            ("corpus", self.config.data.corpus or "-"),
            ("device", str(self.device)),
        ]
        return facts_html(self.config.name, facts) + ("" if spans is None else spans._repr_html_())

    def _continue(
        self,
        start: TextState,
        drawn: list[tuple[int, float]],
        end: StopStrings,
        tokens: int,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        repetition_penalty: float,
        generator: torch.Generator,
    ) -> Iterator[str]:
        """Text after `start` up to a stop string; its tokens and log-probabilities are added to `drawn`."""
        text = self.tokenizer.stream()
        for token in start.tail:  # what follows may depend on them: a blank, an incomplete character
            text.push(token)
        for token, log_prob in sample_from(
            self.model,
            start,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            generator=generator,
        ):
            drawn.append((token, log_prob))
            yield end.push(text.push(token))
            if end.found is not None:
                return
        yield end.push(text.flush()) + end.flush()

    def _start(self, prompt: str, state: TextState | None) -> TextState:
        self.warn_of_unknown(prompt)
        return self.read(prompt, state)

    def _encode(self, text: Any) -> npt.NDArray[np.int64]:
        if not isinstance(text, str):
            numbers = " (token ids as text: '3 17 4')" if self.tokenizer.kind == "number" else ""
            raise UserError(f"a text must be a str, not {type(text).__name__}{numbers}")
        return self.tokenizer.encode(text).astype(np.int64) if text else np.empty(0, dtype=np.int64)

    def _check_state(self, state: Any) -> TextState | None:
        if state is None:
            return None
        if not isinstance(state, TextState):
            raise UserError(f"a state comes from read, score or generate, it is no {type(state).__name__}")
        if state.state.flatten().keys() != self.model.initial_state(1).flatten().keys():
            raise UserError("this state comes from another model: read the text with this one")
        return state

    def _at_line_start(self) -> TextState:
        try:
            ids = self._encode("\n")
        except UserError:  # a vocabulary without line ends
            ids = self._encode("")
        return begin(self.model, ids if len(ids) else [0])


def seeded_generator(seed: int | None) -> torch.Generator:
    """The random numbers of one text; without a seed others every time."""
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
    plugins: Iterable[str] = (),
) -> LoadedModel:
    """The model of a run folder, ready to evaluate and generate.

    `overrides` change options of the run by their dotted names, such as `{"model.span.memory": "full"}`.
    `plugins` are modules to import first, besides those that the run's configuration names.
    """
    folder = RunFolder.open(Path(run))
    load_plugins(plugins)
    config = _overridden(folder.config, overrides or {})
    tokenizer = folder.tokenizer()
    path = _checkpoint(folder, which)
    model = build_run(config, tokenizer.vocabulary_size)
    load_weights(model, path)
    target = pick_device(device)
    return LoadedModel(model.to(target).eval(), tokenizer, config, target, folder.path)


def _checkpoint(folder: RunFolder, which: Literal["best", "last"]) -> Path:
    path = folder.checkpoint(which)
    other: Literal["best", "last"] = "last" if which == "best" else "best"
    if checkpoint.exists(path):
        return path
    if checkpoint.exists(folder.checkpoint(other)):
        raise UserError(
            f'there is no checkpoint {path}; use --checkpoint {other} (in Python: which="{other}")'
        )
    raise UserError(
        f"there is no checkpoint {path}: the run has saved nothing yet; continue with "
        f"'{folder.resume_command}'"
    )


def _overridden(config: RunConfig, overrides: Mapping[str, str | int | float | bool]) -> RunConfig:
    table = schema.write(config)
    with usage_errors():  # the configuration without them has been read already
        override_all(table, overrides)
        return schema.read(RunConfig, table)
