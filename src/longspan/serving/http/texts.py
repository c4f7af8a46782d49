"""From tokens to answers: OpenAI's completions, whole or as server-sent events.

Events are put together from strings: for a small model anything slower takes longer than a step.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from longspan.serving.http.generation import Prompt
from longspan.serving.request import Token

DONE = b"data: [DONE]\n\n"


@dataclass
class Chosen:
    """The text of one choice so far, and where it is; log-probabilities in OpenAI's form."""

    index: int
    texts: list[str]  # of the vocabulary
    logprobs: int | None
    offset: int = 0  # characters so far
    parts: list[str] = field(default_factory=list)  # of the generated text

    def prompt(self, prompt: Prompt) -> tuple[str, dict[str, Any] | None]:
        """The text and log-probabilities of a prompt that is repeated."""
        marks = None
        if self.logprobs is not None:
            pieces = [self.texts[token] for token in prompt.ids]
            offsets, at = [], 0
            for piece in pieces:
                offsets.append(min(at, len(prompt.text)))
                at += len(piece)
            nats = [None, *(_finite(-one) for one in prompt.nats or ())][: len(pieces)]
            tops = None if self.logprobs == 0 else [None] * len(pieces)
            marks = _marks(pieces, nats, tops, offsets)
        self.offset = len(prompt.text)
        return prompt.text, marks

    def token(self, token: Token) -> dict[str, Any] | None:
        """The log-probabilities of a token; it is counted."""
        marks = None
        if self.logprobs is not None:
            own, text = _finite(token.log_prob), self.texts[token.id]
            top = None
            if self.logprobs:
                top = [{self.texts[other]: _finite(log_prob) for other, log_prob in token.top} | {text: own}]
            marks = _marks([text], [own], top, [self.offset])
        self.offset += len(token.text)
        self.parts.append(token.text)
        return marks

    def end(self, text: str) -> str:
        """The last text, which was held back."""
        self.parts.append(text)
        return text


def _marks(tokens: list[str], own: list[Any], top: list[Any] | None, offsets: list[int]) -> dict[str, Any]:
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass
class Writer:
    """The answer to one request."""

    model: str
    prompt_tokens: int
    usage_event: bool = False
    more: dict[str, Any] = field(default_factory=dict)  # fields of ours
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_urlsafe(16)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._head = f'data: {json.dumps(self._fields())[:-1]}, "choices": [{{"index": '
        self._tail = '}], "usage": null}\n\n' if self.usage_event else "}]}\n\n"

    def event(self, index: int, text: str, marks: dict[str, Any] | None, reason: str | None = None) -> str:
        """A piece of one choice."""
        shown = "null" if marks is None else json.dumps(marks)
        end = "null" if reason is None else f'"{reason}"'
        return (
            f'{self._head}{index}, "text": {json.dumps(text)}, "logprobs": {shown}, '
            f'"finish_reason": {end}{self._tail}'
        )

    def last(self, generated: int) -> str:
        """The event with the number of tokens, if it was asked for."""
        if not self.usage_event:
            return ""
        return f"data: {json.dumps({**self._fields(), 'choices': [], 'usage': self._usage(generated)})}\n\n"

    def whole(self, choices: Sequence[dict[str, Any]], generated: int) -> bytes:
        """The answer in one piece."""
        return json.dumps({**self._fields(), "choices": choices, "usage": self._usage(generated)}).encode()

    def _fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            **self.more,
        }

    def _usage(self, generated: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
        }


@dataclass
class Collected:
    """A choice of an answer in one piece."""

    index: int
    parts: list[str] = field(default_factory=list)
    marks: dict[str, Any] | None = None
    reason: str | None = None

    def add(self, text: str, marks: dict[str, Any] | None) -> None:
        self.parts.append(text)
        if marks is not None and self.marks is None:
            self.marks = marks
        elif marks is not None and self.marks is not None:
            for name, values in marks.items():
                if values is not None:
                    self.marks[name] += values

    def choice(self) -> dict[str, Any]:
        """As JSON values."""
        text = "".join(self.parts)
        return {"index": self.index, "text": text, "logprobs": self.marks, "finish_reason": self.reason}
