"""The forms of answers, for the description of the interface; they are written without it: it is slow."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class Logprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[int]


class ChoiceAnswer(BaseModel):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["length", "stop"] | None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[ChoiceAnswer]
    usage: Usage


class SessionCompletion(Completion):
    session: str


class ModelLimits(BaseModel):
    max_prompt_tokens: int
    max_tokens: int
    inspected_tokens: int


class ModelAnswer(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    vocabulary_size: int
    parameters: int
    limits: ModelLimits


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelAnswer]


class SessionAnswer(BaseModel):
    id: str
    object: Literal["session"]
    model: str
    tokens: int
    text_tail: str
    created: float
    last_used: float
    saved: bool
    in_memory: bool
    bytes: int


class SessionList(BaseModel):
    object: Literal["list"]
    data: list[SessionAnswer]


class DeletedSession(BaseModel):
    id: str
    object: Literal["session"]
    deleted: Literal[True]


class TextScoreAnswer(BaseModel):
    tokens: list[int]
    pieces: list[str]
    token_bits: list[float | None]
    bytes: int | None
    bits: float | None
    bits_per_byte: float | None


class ScoreList(BaseModel):
    object: Literal["list"]
    model: str
    data: list[TextScoreAnswer]


class InspectedToken(BaseModel):
    text: str
    bits: float | None


class InspectedLayer(BaseModel):
    name: str
    mean_distance: list[list[float | None]]
    reach: list[list[float | None]]


class Inspection(BaseModel):
    model: str
    tokens: list[InspectedToken]
    layers: list[InspectedLayer]


class RunEntryAnswer(BaseModel):
    name: str
    object: Literal["run"]
    model: str | None


class RunList(BaseModel):
    object: Literal["list"]
    data: list[RunEntryAnswer]


class StatusAnswer(BaseModel):
    status: str
