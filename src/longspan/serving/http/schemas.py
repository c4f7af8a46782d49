"""The bodies of requests. Types are strict and unknown fields are refused: a misspelt option is found."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_CHOICES = 128  # of one request: prompts times n
MAX_STOPS, MAX_STOP = 16, 1_000  # stop strings, and characters of one
MAX_TEXTS = 128


def _encodable(text: str) -> str:
    """JSON can hold halves of characters, which are no text."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise ValueError(f"character {problem.start} is a lone surrogate") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Stop = Annotated[Text, Field(min_length=1, max_length=MAX_STOP)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]  # else there is an error for every token
Nothing = Field(default=None, ge=0, le=0, description="not supported: 0")


class Asked(BaseModel):
    """A body."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Asked):
    """What a stream contains besides the text."""

    include_usage: bool | None = Field(default=None, description="a last event with the number of tokens")
    include_obfuscation: bool | None = Field(default=None, description="ignored")


class SamplingFields(Asked):
    """How text is generated. Null is the same as leaving a field out."""

    max_tokens: int | None = Field(default=None, ge=0, lt=2**31, description="default: 16")
    temperature: float | None = Field(
        default=None, ge=0, le=100, description="default: 1; 0: the most likely"
    )
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1, lt=2**31)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="choice i gets seed + i")
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = Field(
        default=None, description="the text ends before the first of these"
    )
    logprobs: int | None = Field(default=None, ge=0, le=20, description="alternatives with each token")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, description="ignored")


class CompletionRequest(SamplingFields):
    """The body of /v1/completions."""

    model: Text
    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | None
    ) = Field(default=None, description="a text, token ids, or a list of either; default: an empty text")
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES, description="choices of each prompt")
    echo: bool | None = Field(default=None, description="the prompt is part of the text")
    best_of: Literal[1] | None = Field(default=None, description="not supported: 1")
    suffix: Literal[""] | None = Field(default=None, description="not supported: empty")
    presence_penalty: float | None = Nothing
    frequency_penalty: float | None = Nothing
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = Field(
        default=None, description="not supported: empty"
    )


class SessionGeneration(SamplingFields):
    """The body of /v1/sessions/{id}/generate."""


class ScoreRequest(Asked):
    """The body of /v1/score: `text` or `texts`."""

    model: Text
    text: Text | None = None
    texts: Annotated[list[Text], Field(max_length=MAX_TEXTS)] | None = None


class InspectRequest(Asked):
    """The body of /v1/inspect."""

    model: Text
    text: Text


class NewSession(Asked):
    """The body of /v1/sessions."""

    model: Text
    text: Text = Field(default="", description="what the session reads first")


class AppendRequest(Asked):
    """The body of /v1/sessions/{id}/append."""

    text: Text
