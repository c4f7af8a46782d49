"""What a model makes of a text: the bits of every token, and how far back each head looks."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from longspan.json_text import to_json
from longspan.serving.http.answers import Inspection, ScoreList
from longspan.serving.http.errors import ApiError, documented
from longspan.serving.http.schemas import InspectRequest, ScoreRequest
from longspan.serving.http.service import Served, Service, until_gone

if TYPE_CHECKING:
    from longspan.reading import TextState
    from longspan.serving.reading_work import InspectedText

router = APIRouter()
_ERRORS = documented(400, 404, 413, 415, 422, 429)


@router.post("/v1/score", response_model=ScoreList, responses=_ERRORS)
async def score(request: Request, asked: ScoreRequest) -> Response:
    """The bits of every token of one or several texts, each read after a line end."""
    service: Service = request.app.state.service
    served = service.model(asked.model)
    if (asked.text is None) == (asked.texts is None):
        raise ApiError(422, "give either text or texts", "invalid_value", "text")
    texts = [asked.text] if asked.text is not None else list(asked.texts or ())
    ids = [await served.encode(text) for text in texts]
    service.limits.check_prompt(sum(map(len, ids)))
    data = []
    for text, tokens in zip(texts, ids, strict=True):
        nats = await until_gone(request.receive, _nats(service, served, tokens))
        data.append(_scored(served, text, tokens, nats))
    return _answer({"object": "list", "model": served.id, "data": data})


async def _nats(service: Service, served: Served, ids: list[int]) -> list[float]:
    if not ids:
        return []
    found: tuple[list[float], TextState] = await service.result(
        lambda done: served.engine.score(None, ids, done)
    )
    return found[0]


def _scored(served: Served, text: str, ids: list[int], nats: list[float]) -> dict[str, Any]:
    bits = [one / math.log(2) for one in nats]
    size = len(text.encode()) if served.lm.tokenizer.knows_text else None
    total = math.fsum(bits)
    return {
        "tokens": ids,
        "pieces": served.pieces(ids),
        "token_bits": bits,
        "bytes": size,
        "bits": total,
        "bits_per_byte": total / size if size else None,
    }


@router.post("/v1/inspect", response_model=Inspection, responses=_ERRORS)
async def inspect(request: Request, asked: InspectRequest) -> Response:
    """The bits of every token of a short text, and the look-back of every layer and head at it."""
    service: Service = request.app.state.service
    served = service.model(asked.model)
    ids = await served.encode(asked.text)
    service.limits.check_inspected(len(ids))
    if not ids:
        return _answer({"model": served.id, "tokens": [], "layers": []})
    found: InspectedText = await until_gone(
        request.receive, service.result(lambda done: served.engine.inspect(ids, done))
    )
    tokens = [{"text": text, "bits": bits} for text, bits in zip(served.pieces(ids), found.bits, strict=True)]
    return _answer({"model": served.id, "tokens": tokens, "layers": [asdict(one) for one in found.layers]})


def _answer(value: Any) -> Response:
    """Numbers that are not finite are null."""
    return Response(to_json(value), media_type="application/json")
