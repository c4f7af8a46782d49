"""OpenAI's completions."""

from __future__ import annotations

from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from longspan.serving.http.answering import Answering
from longspan.serving.http.answers import Completion
from longspan.serving.http.errors import ApiError, documented
from longspan.serving.http.generation import Prompt, sampling, start
from longspan.serving.http.schemas import MAX_CHOICES, CompletionRequest, SamplingFields
from longspan.serving.http.service import Served, Service, until_gone
from longspan.serving.http.texts import Chosen, Writer

router = APIRouter()
EVENTS: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses={200: {"content": EVENTS}, **documented(400, 404, 413, 415, 422, 429)},
)
async def completions(request: Request, asked: CompletionRequest) -> Response:
    """Continue one or several prompts. With `stream`, server-sent events that end with `data: [DONE]`."""
    service: Service = request.app.state.service
    served, how, n = service.model(asked.model), sampling(asked, service), asked.n or 1
    prompts = await _prompts(service, served, asked)
    if len(prompts) * n > MAX_CHOICES:
        raise ApiError(400, f"there may be at most {MAX_CHOICES} choices, prompts times n", "too_many", "n")
    scored = bool(asked.echo) and asked.logprobs is not None
    generation, read = await until_gone(request.receive, start(service, served, prompts, n, how, scored))
    writer = Writer(served.id, sum(len(one.ids) for one in prompts), usage_wanted(asked))
    choices = [Chosen(number, served.texts, asked.logprobs) for number in range(generation.choices)]
    echoed = [one for one in read for _ in range(n)] if asked.echo else None
    return await Answering(generation, writer, choices, echoed).respond(request, bool(asked.stream))


def usage_wanted(asked: SamplingFields) -> bool:
    """Whether a stream ends with the number of tokens."""
    return asked.stream_options is not None and bool(asked.stream_options.include_usage)


async def _prompts(service: Service, served: Served, asked: CompletionRequest) -> list[Prompt]:
    given: Any = "" if asked.prompt is None else asked.prompt
    several = isinstance(given, list) and not isinstance(given[0], int)
    found = []
    for one in given if several else [given]:
        if isinstance(one, str):
            prompt = Prompt(await served.encode(one), one)
        else:
            _check_ids(served, cast("list[int]", one))
            prompt = Prompt(one, served.lm.tokenizer.decode(one) if asked.echo else "")
        found.append(prompt)
    service.limits.check_prompt(sum(len(one.ids) for one in found))
    return found


def _check_ids(served: Served, ids: list[int]) -> None:
    size = served.lm.tokenizer.vocabulary_size
    if max(ids) >= size:
        message = f"token {max(ids)} is not in the vocabulary: ids are 0 to {size - 1}"
        raise ApiError(400, message, "invalid_token", "prompt")
