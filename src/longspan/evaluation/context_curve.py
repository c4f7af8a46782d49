"""Bits as a function of how much of the past a model may see.

The layers of a model see further together than each of them alone, and a carried state sees further still. So
a limited past cannot be had by cutting windows. Here a text is read from an empty state that begins C tokens
before the first token that is scored: nothing before them can have any effect. For context C the scored
tokens are read in runs of C / 4. The first token of a run sees exactly the last C tokens, the last one up to
5/4 C. So long contexts cost about five tokens read per token scored.

All contexts score the same tokens: the ends of the lanes of an evaluation. The last point, "all", is that
evaluation itself: every lane is read from its beginning, with carried state.

A model of fixed contexts begins a new one when one is full. A row is left out if that would happen inside its
runs, since most tokens would then see less than the row says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from longspan import distributed
from longspan.errors import UserError
from longspan.evaluation.evaluate import sum_of_nats
from longspan.evaluation.measure import scored_text, scored_unknown
from longspan.evaluation.protocols import EvaluationPlan, Lane, every_token

if TYPE_CHECKING:
    from longspan.data import TokenArray, TokenFile, Tokenizer
    from longspan.models.interface import LanguageModel

CONTEXTS = (16, 64, 256, 1024, 4096, 8192)
SCORED_TOKENS = 32_768
LANES = 8  # for every model: only then two models score the same tokens of a text
TEXT_TOKENS = 1 << 20  # "all" reads the whole text
_STATE_BYTES = 1 << 28  # of the states of more rows than the evaluation has lanes


@dataclass(frozen=True)
class ContextPoint:
    """The nats of all scored tokens, each predicted from at least `least` and at most `most` tokens.

    `context` is None for all of the past. The numbers are of tokens that are read; a model that is not
    `block_invariant` sees more or less of them, depending on its memory and on where its blocks begin.
    """

    context: int | None
    least: int
    most: int
    nats: float


@dataclass(frozen=True)
class ContextCurve:
    """The points, shortest context first, and the text that all of them scored; see `Score` for `bytes`.

    They are from the first `read` tokens of the text; `beyond` more were not read.
    """

    points: tuple[ContextPoint, ...]
    tokens: int
    bytes: int | None
    unknown: int
    lanes: int
    block_length: int
    read: int
    beyond: int
    model_context: int | None  # after so many tokens the model begins anew
    left_out: tuple[int, ...]  # contexts that are too long for the text or for the model

    def bits_per_byte(self, point: ContextPoint) -> float:
        """NaN if the text of the tokens is unknown."""
        return math.nan if self.bytes is None else point.nats / math.log(2) / max(self.bytes, 1)

    def bits_per_token(self, point: ContextPoint) -> float:
        return point.nats / math.log(2) / self.tokens

    def fits_model(self, context: int) -> bool:
        """Whether a run of this context ends before the model begins a new one."""
        return _fits(context, self.model_context)

    def figures(self) -> dict[str, Any]:
        """JSON values."""
        points = [
            {"context": point.context, "least": point.least, "most": point.most, "nats": point.nats}
            | ({} if self.bytes is None else {"bits_per_byte": self.bits_per_byte(point)})
            | {"bits_per_token": self.bits_per_token(point)}
            for point in self.points
        ]
        known = {} if self.bytes is None else {"bytes": self.bytes}
        return {
            "context_curve": points,
            "tokens": self.tokens,
            **known,
            "unknown": self.unknown,
            "lanes": self.lanes,
            "block_length": self.block_length,
            "read": self.read,
            "beyond": self.beyond,
            "model_context": self.model_context,
            "left_out": list(self.left_out),
        }


def context_curve(
    model: LanguageModel,
    token_file: TokenFile | TokenArray,
    *,
    tokenizer: Tokenizer,
    batch_size: int = LANES,
    block_length: int,
    contexts: Sequence[int] = CONTEXTS,
    scored_tokens: int = SCORED_TOKENS,
    max_tokens: int | None = None,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,
) -> ContextCurve:
    """The nats of at most `scored_tokens` tokens for each of `contexts` and for all of the past.

    They are taken from the first `max_tokens` predictable tokens. `batch_size` is the largest number of
    lanes; there are fewer if lanes would be shorter than two of the longest contexts. `progress(done, total)`
    is called with numbers of tokens read.
    """
    num_tokens = min(len(token_file), (max_tokens or TEXT_TOKENS) + 1)
    asked = sorted({*contexts})
    fits = [context for context in asked if _fits(context, model.context)]
    if asked and not fits:
        raise UserError(
            f"the model begins a new context every {model.context:,} tokens, and a context of "
            f"{asked[0]:,} needs {reach(asked[0]):,}: give shorter contexts"
        )
    kept = [context for context in fits if 2 * context < num_tokens]
    if asked and not kept:
        longer = (
            "read more of the text (max_tokens)" if num_tokens < len(token_file) else "give a longer text"
        )
        raise UserError(
            f"a context of {asked[0]:,} needs {2 * asked[0]:,} tokens that can be scored, not "
            f"{num_tokens - 1:,}: {longer}, or give shorter contexts"
        )
    # Without the contexts that are too long for the model: else the scored tokens would depend on it.
    longest = max((context for context in asked if 2 * context < num_tokens), default=1)
    plan = ends_of_lanes(num_tokens, batch_size, longest, scored_tokens)
    rows = _Rows(batch_size * block_length, block_length, batch_size, _state_bytes(model))
    plans = [(context, list(runs(plan, context, rows))) for context in kept]
    told = _Told(progress, sum(map(_read, [part for _, parts in plans for part in parts])) + _read(plan))

    def nats(part: EvaluationPlan) -> float:
        with told.reading(part, block_length) as block:
            found, _ = sum_of_nats(model, token_file.tokens, part, block_length, 1, True, device, block)
        return found[0]

    points = [
        ContextPoint(context, context, max(part.longest for part in parts), math.fsum(map(nats, parts)))
        for context, parts in plans
    ]
    points.append(ContextPoint(None, *_seen(plan, model.context), nats(plan)))
    return ContextCurve(
        points=tuple(points),
        tokens=plan.tokens,
        bytes=scored_text(token_file, tokenizer, plan).bytes,
        unknown=scored_unknown(token_file, tokenizer, plan),
        lanes=len(plan.lanes),
        block_length=block_length,
        read=num_tokens,
        beyond=len(token_file) - num_tokens,
        model_context=model.context,
        left_out=tuple(context for context in asked if context not in kept),
    )


def ends_of_lanes(num_tokens: int, batch_size: int, longest: int, scored: int) -> EvaluationPlan:
    """The lanes of an evaluation, of which only the ends are scored: `scored` tokens in all, or fewer.

    Every scored token has `longest` tokens before it in its lane.
    """
    lanes = min(batch_size, scored, max(1, (num_tokens - 1) // (2 * longest)))
    whole = every_token(num_tokens, lanes, 1)
    shortest = min(lane.length for lane in whole.lanes)
    each = min(scored // len(whole.lanes), shortest - longest + 1)
    ends = tuple(Lane(lane.start, lane.length, lane.length - each) for lane in whole.lanes)
    return EvaluationPlan(ends, each * len(ends), "only the ends of lanes are scored")


@dataclass(frozen=True)
class _Rows:
    """How many rows are read at once: as many tokens as the evaluation reads, if their states fit."""

    tokens: int
    block_length: int
    lanes: int
    state_bytes: int

    def of(self, length: int) -> int:
        by_tokens = self.tokens // min(length, self.block_length)
        return max(1, min(by_tokens, max(self.lanes, _STATE_BYTES // max(self.state_bytes, 1))))


def runs(plan: EvaluationPlan, context: int, rows: _Rows) -> Iterator[EvaluationPlan]:
    """The tokens that `plan` scores, in runs that begin `context` tokens before their first scored token."""
    stride = _stride(context)
    lanes = (
        Lane(first - context, context - 1 + min(stride, end - first), context - 1)
        for lane in plan.lanes
        for end in [lane.start + 1 + lane.length]
        for first in range(lane.start + 1 + lane.warm, end, stride)
    )
    while group := tuple(itertools.islice(lanes, rows.of(reach(context)))):
        yield EvaluationPlan(group, sum(lane.length - lane.warm for lane in group), plan.skipped_because)


def _stride(context: int) -> int:
    return max(1, context // 4)


def reach(context: int) -> int:
    """How many tokens the last scored token of a run sees."""
    return context + _stride(context) - 1


def _fits(context: int, model_context: int | None) -> bool:
    return model_context is None or reach(context) <= model_context


def _seen(plan: EvaluationPlan, model_context: int | None) -> tuple[int, int]:
    """The fewest and the most tokens that a scored token sees."""
    if model_context is None:
        return min(lane.warm for lane in plan.lanes) + 1, plan.longest
    seen = {
        place % model_context + 1
        for lane in plan.lanes
        for place in range(lane.warm, min(lane.length, lane.warm + model_context))
    }
    return min(seen), max(seen)


def _read(plan: EvaluationPlan) -> int:
    return sum(lane.length for lane in plan.lanes)


def _state_bytes(model: LanguageModel) -> int:
    leaves = distributed.initial_state(model, 1).flatten().values()
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


class _Told:
    """Counts what was read and tells `progress`."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    @contextmanager
    def reading(self, plan: EvaluationPlan, block_length: int) -> Iterator[Callable[[int, int], None]]:
        """Gives a function to call after every block of `plan`."""
        after = self._done + _read(plan)

        def block(*_: int) -> None:
            self._tell(min(self._done + len(plan.lanes) * block_length, after))

        yield block
        self._tell(after)

    def _tell(self, done: int) -> None:
        if done > self._done and self._progress is not None:
            self._progress(done, self._total)
        self._done = done
