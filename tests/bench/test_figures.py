"""Every number that a benchmark reports, by hand."""

from __future__ import annotations

import json

import pytest
import torch

from longspan.bench import machine
from longspan.bench.agreement import Agreement
from longspan.bench.figures import Decoding, Figures, Steps, Work
from longspan.bench.machine import matrix_rate, reading_seconds, seconds_of, watch_memory
from longspan.bench.spans import learned_spans, set_profile, set_spans, span_profile
from longspan.config import AdaptiveSpanConfig, SpanConfig
from longspan.errors import UserError
from longspan.models import build

CPU = torch.device("cpu")
WORK = Work(tokens=1000, flops_per_token_forward=2e6, matrix_flops_per_second=1e11)


def steps(path: str, *seconds: float) -> Steps:
    return Steps(path, "so", list(seconds), 3 * 2**30)


def figures(*timed: Steps, decoding: Decoding | None = None) -> Figures:
    return Figures(
        recipe="mine",
        parameters=7,
        vocabulary_size=256,
        batch_size=2,
        block_length=500,
        precision="float32",
        spans="start",
        mean_window=48.0,
        agreement=Agreement("the output", 1e-7, 1e-3),
        work=WORK,
        steps=list(timed),
        decoding=decoding,
    )


def test_rate_and_share_come_from_the_median():
    timed = steps("fast", 0.2, 0.1, 9.0)
    assert timed.tokens_per_second(WORK) == pytest.approx(5000)
    assert WORK.flops == pytest.approx(6e9)
    # 6e9 FLOPs in 0.2 s are 3e10 in a second, of 1e11
    assert timed.share_of_matrix_rate(WORK) == pytest.approx(0.3)


def test_decoding_beside_its_floor():
    decoding = Decoding([0.004, 0.002, 0.009], reading_seconds=0.001)
    assert decoding.tokens_per_second == pytest.approx(250)
    assert decoding.floor_tokens_per_second == pytest.approx(1000)
    assert decoding.times_of_floor == pytest.approx(4)


def test_speedup_needs_two_paths():
    assert figures(steps("reference", 3.0), steps("fast", 1.5)).speedup == pytest.approx(2)
    assert figures(steps("fast", 1.5)).speedup is None


def test_json_holds_what_is_computed_and_what_from():
    table = figures(
        steps("reference", 0.4), steps("fast", 0.2), decoding=Decoding([0.01], reading_seconds=0.005)
    ).as_json()
    table = json.loads(json.dumps(table))
    assert table["speedup"] == pytest.approx(2)
    assert table["work"]["flops_per_step"] == pytest.approx(6e9)
    assert [one["path"] for one in table["steps"]] == ["reference", "fast"]
    fast = table["steps"][1]
    assert fast["seconds"] == [0.2]
    assert fast["tokens_per_second"] == pytest.approx(5000)
    assert fast["share_of_matrix_rate"] == pytest.approx(0.3)
    assert fast["peak_memory_bytes"] == 3 * 2**30
    assert table["decoding"]["times_of_floor"] == pytest.approx(2)
    assert table["agreement"] == {"tensor": "the output", "error": 1e-7, "allowed": 1e-3}


def test_profile_of_twelve_layers_and_eight_heads():
    spans = span_profile(12, 8, 8192)
    far = {(layer, 0): 600 + 500 * (layer - 6) for layer in range(6, 12)} | {(10, 1): 5000, (11, 1): 5000}
    for layer in range(12):
        for head in range(8):
            expected = far.get((layer, head))
            assert spans[layer][head] == expected if expected else 8 <= spans[layer][head] <= 120
    assert sum(map(sum, spans)) / 96 == pytest.approx(280, abs=10)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (3, 2), (8, 4)])
def test_profile_of_any_shape_keeps_to_the_limit(shape):
    spans = span_profile(*shape, 700)
    assert [len(layer) for layer in spans] == [shape[1]] * shape[0]
    assert max(map(max, spans)) <= 700
    assert min(map(min, spans)) >= 8


def tiny(**span: object) -> AdaptiveSpanConfig:
    return AdaptiveSpanConfig(
        num_layers=2, width=16, num_heads=2, inner_width=32, span=SpanConfig(limit=512, ramp=4, **span)
    )


def test_spans_are_set_and_their_windows_follow():
    model = build(tiny(), 11)
    set_spans(model, [[8, 16], [300, 32]])
    assert model.diagnostics()["spans_LH"].tolist() == [[12, 20], [304, 36]]
    assert [max(span.windows) for span in learned_spans(model)] == [32, 320]


def test_heads_that_share_a_span_get_the_longest():
    model = build(tiny(per="layer", softmax_over="layer"), 11)
    set_spans(model, [[8, 16], [300, 32]])
    assert model.diagnostics()["spans_LH"].tolist() == [[20, 20], [304, 304]]


def test_a_profile_rises_where_limits_do():
    model = build(tiny(limit_shortest=64), 11)
    set_profile(model, "mine")
    spans_LH = [span().detach().round().tolist() for span in learned_spans(model)]
    assert spans_LH == [list(map(min, sorted(own), (64, 512))) for own in span_profile(2, 2, 512)]


def test_spans_beyond_a_limit_are_refused():
    with pytest.raises(UserError, match=r"exceed the limits of the heads, \(64, 512\)"):
        set_spans(build(tiny(limit_shortest=64), 11), [[65, 100], [8, 8]])


def test_a_profile_is_for_learned_spans():
    with pytest.raises(UserError, match="mine has no learned spans"):
        set_profile(build(tiny(kind="fixed"), 11), "mine")


def test_warm_ups_do_not_count():
    done: list[int] = []
    assert len(seconds_of(lambda: done.append(0), CPU, times=3, warm_ups=2)) == 3
    assert len(done) == 5


class FakeGpu:
    """Does what it was asked one thing after the other, by a clock of its own, and notes who waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.milliseconds, self.notes = 0.0, []
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: self.notes.append("wait"))

    def work(self) -> None:
        self.notes.append("work")
        self.milliseconds += self.notes.count("work")


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    def record(self, stream: str) -> None:
        assert stream == "the stream of cuda:1"
        self.at = self.gpu.milliseconds
        self.gpu.notes.append("mark")

    def synchronize(self) -> None:
        assert self.at == self.gpu.milliseconds
        self.gpu.notes.append("wait")

    def elapsed_time(self, after: FakeEvent) -> float:
        assert self.gpu.notes[-1] == "wait"
        return after.at - self.at


def test_on_a_gpu_nobody_waits_between_steps(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    # The nth step takes n milliseconds; two are for warming up.
    seconds = seconds_of(gpu.work, torch.device("cuda:1"), times=3, warm_ups=2)
    assert seconds == pytest.approx([0.003, 0.004, 0.005])
    assert gpu.notes == ["work", "work", "mark", *["work", "mark"] * 3, "wait"]


def test_the_machine_is_measured(monkeypatch):
    monkeypatch.setattr(machine, "seconds_of", lambda *_, **__: [0.5, 0.25, 0.125])
    monkeypatch.setitem(machine._SIDE, "cpu", 10)
    assert matrix_rate(CPU, "float32") == pytest.approx(2 * 10**3 / 0.125)
    assert reading_seconds([torch.ones(3), torch.ones(2, 2)]) == 0.125


def test_halves_are_multiplied_in_small_matrices_on_a_cpu(monkeypatch):
    sides = []

    def first(work, *_, **__):
        sides.append(len(work()))
        return [1.0]

    monkeypatch.setattr(machine, "seconds_of", first)
    assert matrix_rate(CPU, "fp16") == pytest.approx(2 * 512**3)
    assert sides == [512]


def test_memory_is_what_was_held_at_the_most():
    told = watch_memory(CPU)
    if told() is None:
        pytest.skip("this system does not tell")
    held = torch.ones(50 * 2**20)
    del held
    first = told()
    again = watch_memory(CPU)
    assert first is not None
    assert first == pytest.approx(200 * 2**20, rel=0.2)
    assert (again() or 0) < 50 * 2**20


def test_on_a_gpu_memory_is_what_is_reserved(monkeypatch):
    """Beyond what was held when the watch began, with nothing in the cache."""
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("anew"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: calls.append("held") or 300)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 1000)
    told = watch_memory(torch.device("cuda"))
    assert calls == ["empty", "anew", "held"]
    assert told() == 700
