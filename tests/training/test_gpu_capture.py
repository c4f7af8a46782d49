"""On a GPU: captures that fail leave no trace, neither in the run nor in other models of the process.

    python -m pytest tests/training/test_gpu_capture.py

takes about a minute. Models do during the capture what no capture allows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.config import AdaptiveSpanConfig, ShaRnnConfig, SpanConfig
from longspan.cuda_graphs import capture
from longspan.generation import Decoder
from longspan.models import LanguageModel, build
from longspan.training.graphs import STEADY
from longspan.training.step import Updater

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCABULARY, STEPS = 11, STEADY + 8
SPAN = SpanConfig(kind="fixed", limit=96, ramp=4)
CONFIGS: dict[str, Any] = {
    "adaptive-span": AdaptiveSpanConfig(
        num_layers=2, width=32, num_heads=2, inner_width=48, dropout=0.2, embedding_dropout=0.1, span=SPAN
    ),
    "sha-rnn": ShaRnnConfig(num_layers=2, width=32, inner_width=48, memory_length=12, dropout=0.2),
}


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def item(x: Tensor) -> None:
    x.sum().item()


def synchronize(x: Tensor) -> None:
    torch.cuda.synchronize()


def plain_error(x: Tensor) -> None:
    raise ValueError("not while capturing")


def out_of_memory(x: Tensor) -> None:
    torch.empty(2**45, dtype=torch.uint8, device="cuda")


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forbidden: Callable[[Tensor], None]) -> Tensor:
        ctx.forbidden = forbidden
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        if is_capturing():
            ctx.forbidden(dx)
        return dx, None


FORBIDDEN = [item, synchronize, plain_error, out_of_memory]


def spoil(model: LanguageModel, forbidden: Callable[[Tensor], None], where: str) -> None:
    """Let the model do something forbidden in the middle of every capture."""

    def hook(_: Any, __: Any, out: Tensor) -> Tensor:
        if where == "backward":
            return _InBackward.apply(out, forbidden)  # type: ignore[no-any-return]
        if is_capturing():
            forbidden(out)
        return out

    model.embedding.register_forward_hook(hook)


def walk(
    name: str,
    *,
    replayed: bool = True,
    forbidden: Any = None,
    where: str = "forward",
) -> tuple[list[float], list[Tensor], Updater]:
    """Losses and last weights of a short training."""
    torch.manual_seed(2)
    model = build(CONFIGS[name], VOCABULARY).cuda()
    if forbidden is not None:
        spoil(model, forbidden, where)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    updater = Updater(model, precision="bf16")
    if not replayed:
        updater._losses._captured = None
    texts = torch.randint(VOCABULARY, (STEPS, 3, 9), generator=torch.Generator().manual_seed(5))
    state, losses = model.initial_state(3), []
    for text_BT in texts:
        nats, state = updater.update(text_BT[:, :-1], text_BT[:, 1:], state, [sgd], clip_norm=1.0)
        losses.append(nats.item())
    return losses, [p.detach().cpu() for p in model.parameters()], updater


def recorded(updater: Updater) -> bool:
    assert updater._losses._captured is not None
    return updater._losses._captured._captured is not None


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("forbidden", FORBIDDEN)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_failed_capture_changes_nothing(name: str, forbidden: Any, where: str) -> None:
    """The run is the launched one with one warning; then another model is captured, and is right."""
    launched = {each: walk(each, replayed=False) for each in CONFIGS}
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph") as warned:
        failed = walk(name, forbidden=forbidden, where=where)
    assert len([w for w in warned if "cannot be captured" in str(w.message)]) == 1
    assert not recorded(failed[2])
    assert_same(failed, launched[name])
    for each in CONFIGS:
        after = walk(each)
        assert recorded(after[2])
        assert_same(after, launched[each])


def test_a_recording_from_before_is_still_good() -> None:
    """It draws the random numbers it would have drawn, while and after another model's capture fails."""
    launched = walk("adaptive-span", replayed=False)
    _, _, updater = before = walk("adaptive-span")
    assert_same(before, launched)
    text_BT = torch.randint(VOCABULARY, (3, 9))
    state = updater.model.initial_state(3)

    def gradients() -> list[Tensor]:
        torch.cuda.manual_seed(7)
        updater.model.zero_grad()
        updater.gradients(text_BT[:, :-1], text_BT[:, 1:], state)
        return [p.grad.clone() for p in updater.model.parameters() if p.grad is not None]

    for _ in range(STEADY + 1):
        expected = gradients()
    assert recorded(updater)
    with pytest.warns(UserWarning, match="cannot be captured"):
        walk("sha-rnn", forbidden=item)
    assert recorded(updater)
    for one, other in zip(gradients(), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("forbidden", FORBIDDEN)
def test_the_process_is_as_before(forbidden: Any) -> None:
    """Streams, random numbers and memory."""
    stream = torch.cuda.current_stream()
    x = torch.ones(1024, 1024, device="cuda")
    torch.cuda.manual_seed(3)
    expected = torch.rand(8, device="cuda")
    torch.cuda.manual_seed(3)

    def work() -> None:
        kept = [torch.nn.functional.dropout(x) @ x for _ in range(64)]
        forbidden(kept[-1])

    sizes = []
    for _ in range(3):
        with pytest.raises((RuntimeError, ValueError)):
            capture(work)
        gc.collect()
        torch.cuda.empty_cache()
        sizes.append(torch.cuda.memory_reserved())
    assert sizes[1] == sizes[2]  # the first may keep a workspace of cuBLAS
    assert torch.cuda.current_stream() == stream
    assert not is_capturing()
    assert gc.isenabled()
    assert torch.equal(torch.rand(8, device="cuda"), expected)


@pytest.mark.parametrize("forbidden", FORBIDDEN)
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_goes_on_where_its_capture_fails(name: str, forbidden: Any) -> None:
    """The model that is spoilt says what the sound one says, and the sound one is captured afterwards."""
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(4)
    model = build(CONFIGS[name], VOCABULARY).cuda().eval()
    tokens = torch.randint(VOCABULARY, (2, 12)).cuda()

    def said() -> tuple[Tensor, Decoder]:
        decoder = Decoder(model, model.initial_state(2))
        found = [decoder.read(tokens[:, i : i + 1]).clone() for i in range(tokens.shape[1])]
        return torch.stack(found), decoder

    expected, sound = said()
    captures = sound._captured is not None  # SHA-RNN's memory grows: not every model is captured

    def hook(_: Any, __: Any, out: Tensor) -> None:
        if is_capturing():
            forbidden(out)

    spoiled = model.embedding.register_forward_hook(hook)
    if captures:
        with pytest.warns(UserWarning, match="decoding cannot be captured"):
            found, _ = said()
    else:
        found, _ = said()
    torch.testing.assert_close(found, expected)
    spoiled.remove()
    again, decoder = said()
    assert (decoder._captured is not None) == captures
    torch.testing.assert_close(again, expected)
    torch.nn.functional.dropout(torch.ones(4, device="cuda"))  # random numbers outside a capture are fine


def test_what_can_be_captured_is() -> None:
    x = torch.zeros(4, device="cuda")
    graph, y = capture(lambda: x + 1)
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [3.0] * 4
