"""Captured passes: when they are captured and dropped, and that a replay is the launched step bit for bit."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.config import (
    AdaptiveSpanConfig,
    GptConfig,
    ModernConfig,
    RunConfig,
    SearchConfig,
    ShaRnnConfig,
    SpanConfig,
    StageConfig,
    TrainingConfig,
    TransformerXLConfig,
)
from longspan.layers.learned_span import LearnedSpan
from longspan.models import LanguageModel, build, build_run
from longspan.state import State
from longspan.training import Interrupted, graphs, resume, train
from longspan.training.graphs import STEADY, CapturedModel
from longspan.training.step import Updater

from .runs import Signals, outcome, small_config
from .tiny import TinyModel

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Recorder:
    """Stands in for recordings: what it is asked to record it launches."""

    def __init__(self) -> None:
        self.recorded: list[tuple[int, ...]] = []
        self.replays = 0

    def __call__(self, model: LanguageModel, tokens_BT: Tensor, state: State, autocast: Any) -> Replay:
        self.recorded.append(tuple(tokens_BT.shape))
        return Replay(self, model, state)


class Replay:
    """Like a recording it copies what goes in, and writes what comes out over what came out before."""

    def __init__(self, recorder: Recorder, model: LanguageModel, state: State) -> None:
        self.recorder, self.model = recorder, model
        self.state = state.map(torch.clone)
        self.after: State | None = None

    def __call__(self, tokens_BT: Tensor, state: State) -> tuple[tuple[Tensor], State]:
        self.recorder.replays += 1
        for own, leaf in zip(self.state.flatten().values(), state.flatten().values(), strict=True):
            own.copy_(leaf)
        hidden_BTD, after = self.model(tokens_BT, self.state)
        if self.after is None:
            self.after = after.detach().map(torch.clone)
        for own, leaf in zip(self.after.flatten().values(), after.flatten().values(), strict=False):
            own.copy_(leaf) if own.shape == leaf.shape else own.fill_(math.nan)
        return (hidden_BTD,), self.after


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(graphs, "_CapturedStep", made)
    return made


def read(recorded: CapturedModel, times: int, *, lanes: int = 2, block: int = 3) -> None:
    model = recorded.model
    state = model.initial_state(lanes)
    for _ in range(times):
        _, state = recorded(torch.zeros(lanes, block, dtype=torch.long), state, nullcontext())


def test_what_stays_the_same_is_recorded_once(recorder: Recorder) -> None:
    recorded = CapturedModel(TinyModel())
    read(recorded, STEADY)
    assert recorder.recorded == []
    read(recorded, 5)
    assert recorder.recorded == [(2, 3)]
    assert recorder.replays == 5


@pytest.mark.parametrize("other", [{"lanes": 1}, {"block": 4}])
def test_other_shapes_drop_a_recording(recorder: Recorder, other: dict[str, int]) -> None:
    recorded = CapturedModel(TinyModel())
    read(recorded, STEADY + 1)
    read(recorded, 1, **other)
    assert len(recorder.recorded) == 1
    read(recorded, STEADY)  # the first shape again: it has to prove itself again
    assert len(recorder.recorded) == recorder.replays == 1
    read(recorded, 1)
    assert recorder.recorded == [(2, 3), (2, 3)]


def test_the_last_launch_before_a_capture_has_its_strides(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else compiled code would be compiled for other strides while the capture runs."""
    model, seen = TinyModel(), []
    forward = model.forward

    def watched(tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        seen.append([leaf.stride() for leaf in state.flatten().values()])
        hidden_BTD, after = forward(tokens_BT, state)
        return hidden_BTD, after.map(lambda leaf: torch.stack([leaf, leaf], dim=-1)[..., 0])

    monkeypatch.setattr(model, "forward", watched)
    read(CapturedModel(model), STEADY + 1)
    assert recorder.replays == 1
    assert seen[STEADY - 1] == seen[STEADY]
    assert seen[STEADY] == [leaf.stride() for leaf in model.initial_state(2).flatten().values()]


def test_shapes_that_never_stay_are_never_recorded(recorder: Recorder) -> None:
    recorded = CapturedModel(TinyModel())
    for block in (3, 4) * 3:
        read(recorded, STEADY, block=block)
    assert recorder.recorded == []


def test_what_the_model_says_of_itself_drops_a_recording(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows can grow while the memory keeps its length: the shapes that go in do not say it."""
    recorded = CapturedModel(TinyModel())
    key = ["short"]
    monkeypatch.setattr(recorded.model, "shape_key", lambda state: key[0])
    read(recorded, STEADY + 1)
    key[0] = "long"
    read(recorded, STEADY)
    assert len(recorder.recorded) == 1
    read(recorded, 1)
    assert len(recorder.recorded) == 2


def test_memory_that_grows_drops_a_recording(recorder: Recorder) -> None:
    model = adaptive_span("learned")
    recorded = CapturedModel(model)
    read(recorded, STEADY + 1)
    stretch(model)
    read(recorded, STEADY)
    assert len(recorder.recorded) == 1


def test_a_replay_is_rolled_back_if_spans_have_moved(recorder: Recorder) -> None:
    """With the random numbers it drew, and with the state it has written over."""

    def hidden_states(read: Callable[[LanguageModel], Callable[[Tensor, State], Any]]) -> list[Tensor]:
        torch.manual_seed(1)
        model = adaptive_span("learned")
        step, state, seen = read(model), model.initial_state(2), []
        for number, tokens_BT in enumerate(torch.randint(VOCABULARY, (STEADY + 5, 2, 4))):
            if number == STEADY + 3:
                stretch(model)
            hidden_BTD, state = step(tokens_BT, state)
            seen.append(hidden_BTD.detach().clone())
        return seen

    expected = hidden_states(lambda model: model)
    assert recorder.replays == 0
    found = hidden_states(lambda model: partial(CapturedModel(model), autocast=nullcontext()))
    assert recorder.replays == 4  # three, and the one that was rolled back
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["fixed", "learned", "dynamic"])
def test_windows_that_grow_are_seen_by_replays(recorder: Recorder, kind: str) -> None:
    """Windows on the host drop a recording; spans on the device are read by the recording that there is."""

    def hidden_states(read: Callable[[LanguageModel], Callable[[Tensor, State], Any]]) -> list[Tensor]:
        torch.manual_seed(1)
        model = adaptive_span(kind, start=0.9, growth=(0.25, 1.0)).eval()
        step, state, seen = read(model), model.initial_state(2), []
        for number, tokens_BT in enumerate(torch.randint(VOCABULARY, (2 * STEADY + 6, 2, 40))):
            model.progress(number / (2 * STEADY + 6))
            hidden_BTD, state = step(tokens_BT, state)
            seen.append(hidden_BTD.detach().clone())
        return seen

    expected = hidden_states(lambda model: model)
    found = hidden_states(lambda model: partial(CapturedModel(model), autocast=nullcontext()))
    assert len(recorder.recorded) == (1 if kind == "dynamic" else 2)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_model_that_asks_the_device_is_never_recorded(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = CapturedModel(TinyModel())
    monkeypatch.setattr(recorded.model, "shape_key", lambda state: None)
    read(recorded, 3 * STEADY)
    assert recorder.recorded == []


def test_recorded_or_not_the_same_comes_out(recorder: Recorder) -> None:
    model = TinyModel()
    recorded, state, own = CapturedModel(model), model.initial_state(2), model.initial_state(2)
    for tokens_BT in torch.randint(11, (STEADY + 3, 2, 4)):
        hidden_BTD, state = recorded(tokens_BT, state, nullcontext())
        expected_BTD, own = model(tokens_BT, own)
        assert torch.equal(hidden_BTD, expected_BTD)
    assert recorder.replays == 3


@pytest.mark.parametrize(("block", "made"), [(8, 1), (16, 1), (4, 0)])
def test_a_gpt_is_recorded_where_blocks_are_whole_contexts(recorder: Recorder, block: int, made: int) -> None:
    read(CapturedModel(build(GPT, VOCABULARY)), STEADY + 2, block=block)
    assert len(recorder.recorded) == made


def test_what_cannot_be_captured_is_launched_as_if_nobody_had_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt draws random numbers before it fails; one warning, and no second attempt."""
    attempts: list[int] = []

    def fail(model: LanguageModel, tokens_BT: Tensor, state: State, autocast: Any) -> None:
        attempts.append(1)
        model(tokens_BT, state)
        raise RuntimeError("operation not permitted when stream is capturing\nSearch for more")

    def hidden_states(read: Callable[[LanguageModel], Callable[[Tensor, State], Any]]) -> list[Tensor]:
        torch.manual_seed(1)
        model = adaptive_span("learned")
        step, state, seen = read(model), model.initial_state(2), []
        for tokens_BT in torch.randint(VOCABULARY, (STEADY + 5, 2, 4)):
            hidden_BTD, state = step(tokens_BT, state)
            seen.append(hidden_BTD.detach().clone())
        return seen

    expected = hidden_states(lambda model: model)
    monkeypatch.setattr(graphs, "_CapturedStep", fail)
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph") as warned:
        found = hidden_states(lambda model: partial(CapturedModel(model), autocast=nullcontext()))
    assert len(warned) == 1
    assert str(warned[0].message).endswith("slower: operation not permitted when stream is capturing")
    assert attempts == [1]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_on_the_cpu_nothing_is_recorded() -> None:
    assert Updater(TinyModel())._losses._captured is None


# What follows needs a GPU.

VOCABULARY = 11
GROWTH = (0.1, 0.25, 1.0)  # shorter than what is read in each of these parts
XL = TransformerXLConfig(num_layers=2, width=32, num_heads=2, inner_width=48, memory_length=12, dropout=0.1)
GPT = GptConfig(num_layers=2, width=32, num_heads=2, inner_width=48, context=8, dropout=0.1)
MODERN = ModernConfig(
    num_layers=2,
    width=32,
    num_heads=2,
    inner_width=48,
    ngrams=(2, 3),
    ngram_rows=64,
    span=SpanConfig(kind="fixed", limit=16),
)
SHA_RNN = ShaRnnConfig(num_layers=2, width=32, inner_width=48, memory_length=12, dropout=0.1)


def adaptive_span(kind: Any, **options: Any) -> LanguageModel:
    start = 0.3 if kind == "learned" else 0.0
    span = SpanConfig(**{"kind": kind, "limit": 96, "ramp": 4, "start": start, "penalty": 1e-4} | options)
    config = AdaptiveSpanConfig(
        num_layers=2, width=32, num_heads=2, inner_width=48, dropout=0.1, embedding_dropout=0.1, span=span
    )
    return build(config, VOCABULARY)


def supernet() -> LanguageModel:
    config = RunConfig(
        model=XL,
        search=SearchConfig(num_blocks=4),
        training=TrainingConfig(batch_size=3, block_length=8),
        stage=(StageConfig(steps=40, learning_rate=0.1),),
    )
    return build_run(config, VOCABULARY)


MODELS: dict[str, Callable[[], LanguageModel]] = {
    "adaptive-span, fixed": lambda: adaptive_span("fixed"),
    "adaptive-span, learned": lambda: adaptive_span("learned"),
    "adaptive-span, dynamic": lambda: adaptive_span("dynamic"),
    "adaptive-span, fixed, growing": lambda: adaptive_span("fixed", growth=GROWTH),
    "adaptive-span, learned, growing": lambda: adaptive_span("learned", start=0.5, growth=GROWTH),
    "modern, keys and values, growing": lambda: build(
        replace(MODERN, memory="keys-values", span=SpanConfig(limit=256, ramp=4, start=0.3, growth=GROWTH)),
        VOCABULARY,
    ),
    "gpt": lambda: build(GPT, VOCABULARY),
    "modern": lambda: build(MODERN, VOCABULARY),
    "transformer-xl": lambda: build(XL, VOCABULARY),
    "sha-rnn": lambda: build(SHA_RNN, VOCABULARY),
    "supernet": supernet,
}


def stretch(model: LanguageModel) -> None:
    """Let learned spans jump: windows and memory grow with them."""
    with torch.no_grad():
        for span in model.modules():
            if isinstance(span, LearnedSpan):
                for parameter in span.parameters():
                    parameter.mul_(2)
    model.after_update()


def walk(
    make: Callable[[], LanguageModel], device: str, precision: Any, *, replayed: bool
) -> tuple[list[float], list[Tensor]]:
    """The losses and the last weights of a short training in the middle of which learned spans jump."""
    torch.manual_seed(2)
    model = make().to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    updater = Updater(model, precision=precision)
    if not replayed:
        updater._losses._captured = None
    texts = torch.randint(VOCABULARY, (24, 3, 9), generator=torch.Generator().manual_seed(5))
    state, losses = model.initial_state(3), []
    for step, text_BT in enumerate(texts):
        if step == 12:
            stretch(model)
        model.progress(step / len(texts))
        nats, state = updater.update(
            text_BT[:, :-1],
            text_BT[:, 1:],
            state,
            [sgd],
            clip_norm=1.0,
            multi_token=(0.5,) if step < 6 else (),
        )
        losses.append(nats.item())
    return losses, [p.detach().cpu() for p in model.parameters()]


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for every recording that is made, where the same step twice gives the same bits."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    made: list[int] = []
    begin = graphs._CapturedStep.__init__

    def counted(self: Any, *args: Any) -> None:
        made.append(1)
        begin(self, *args)

    monkeypatch.setattr(graphs._CapturedStep, "__init__", counted)
    torch.use_deterministic_algorithms(True)
    yield made
    torch.use_deterministic_algorithms(False)


@needs_gpu
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_on_a_gpu_replayed_steps_are_the_launched_ones(
    make: Callable[[], LanguageModel], precision: str, recordings: list[int]
) -> None:
    losses, weights = walk(make, "cuda", precision, replayed=False)
    assert not recordings
    replayed_losses, replayed_weights = walk(make, "cuda", precision, replayed=True)
    has_spans = any(isinstance(module, LearnedSpan) for module in make().modules())
    assert len(recordings) >= (2 if has_spans else 1)
    assert replayed_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(replayed_weights, weights, strict=True))


@needs_gpu
@pytest.mark.parametrize("kind", ["fixed", "learned", "dynamic"])
def test_on_a_gpu_a_stopped_run_records_again_and_ends_the_same(
    text: Path, tmp_path: Path, kind: str, recordings: list[int]
) -> None:
    config = small_config(
        text,
        training__device="cuda",
        training__micro_batches=1,
        training__block_jitter=False,
        model__span__kind=kind,
    )
    train(config, tmp_path / "whole")
    made = len(recordings)
    assert made > 0
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", reporter=Signals("train step 17 ", signal.SIGINT))
    resume(tmp_path / "run")
    assert len(recordings) > made
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
