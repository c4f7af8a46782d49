"""What a model makes of a text: the bits of every token, and how far back each head looks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from longspan.json_text import to_json
from longspan.serving.http.answers import Inspection, ScoreList
from longspan.serving.http.errors import ApiError, documented
from longspan.serving.http.schemas import InspectRequest, ScoreRequest
from longspan.serving.http.service import Served, Service, until_gone

if TYPE_CHECKING:
    from longspan.inspection.surprise import Block
    from longspan.reading import TextState

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
    blocks: list[Block] = []
    if ids:
        blocks = await until_gone(
            request.receive, service.result(lambda done: served.engine.inspect(ids, done))
        )
    bits = [one for block in blocks for one in block.bits]
    tokens = [{"text": text, "bits": one} for text, one in zip(served.pieces(ids), bits, strict=True)]
    return _answer({"model": served.id, "tokens": tokens, "layers": _layers(blocks)})


def _layers(blocks: list[Block]) -> list[dict[str, Any]]:
    """Heads of tokens; the blocks are joined."""
    found: list[dict[str, Any]] = []
    for layers in zip(*(block.layers for block in blocks), strict=True):
        mean: list[list[float]] = [[] for _ in layers[0].mean_HT]
        reach: list[list[float]] = [[] for _ in layers[0].mean_HT]
        for layer in layers:
            for joined, added_HT in ((mean, layer.mean_HT), (reach, layer.reach_HT)):
                for head, values in zip(joined, added_HT.tolist(), strict=True):
                    head += values
        found.append({"name": layers[0].name, "mean_distance": mean, "reach": reach})
    return found


def _answer(value: Any) -> Response:
    """Numbers that are not finite are null."""
    return Response(to_json(value), media_type="application/json")
