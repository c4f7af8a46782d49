"""The number of CPU threads of an engine: the one with the fastest steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from longspan.serving import threads
from tests.using.tiny import tiny_model


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("seconds", "fastest"), [({2: 0.1, 1: 0.2}, 2), ({2: 0.2, 1: 0.1}, 1)])
def test_the_fastest_number_is_used(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], fastest: int
) -> None:
    monkeypatch.setattr(threads, "_seconds", lambda model, rows, number: seconds[number])
    assert threads.fastest_threads(tiny_model(), 4, 2) == fastest
    assert torch.get_num_threads() == fastest


def test_steps_are_timed() -> None:
    assert threads.fastest_threads(tiny_model(), 4, 2) in (1, 2)
    assert 0 < threads._seconds(tiny_model(), 4, 1) < 1


def test_one_thread_needs_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(threads, "_seconds")
    assert threads.fastest_threads(tiny_model(), 4, 1) == 1
