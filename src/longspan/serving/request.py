"""What a client asks of an engine, and what it gets: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a text is continued; the settings of `LoadedModel.generate`."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # how many alternatives with each token; 0: only the token's own


@dataclass(frozen=True)
class Token:
    """One generated token."""

    id: int
    text: str  # that became complete with it; may be empty, or several characters
    log_prob: float  # of the model, without temperature or filters
    top: tuple[tuple[int, float], ...]  # the most probable tokens with their log-probabilities


@dataclass(frozen=True)
class Finished:
    """The end of a generated text."""

    reason: Literal["length", "stop", "cancelled", "error"]
    text: str  # the last text, which was held back
    error: Exception | None = None
