"""Blocks that are prepared while a step runs are the blocks that would have been read then."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longspan.data import LanePosition, Lanes, TokenBlock
from longspan.training import Interrupted, Reporter, prefetch, train
from longspan.training.prefetch import Prefetcher
from longspan.training.step import Updater

from .runs import Signals, small_config

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SIZE = {"batch_size": 3, "block_length": 8}


def lanes(**options: Any) -> Lanes:
    return Lanes(np.arange(200, dtype=np.uint8), **SIZE, **options)


def blocks_ahead(source: Any, device: torch.device = CPU) -> Prefetcher:
    ahead = Prefetcher(SIZE["batch_size"] * SIZE["block_length"], device)
    ahead.follow(source)
    return ahead


def walk(source: Lanes | Prefetcher, position: LanePosition = Lanes.start) -> Iterator[TokenBlock]:
    while (block := source.next(position)) is not None:
        yield block
        position = block.position


def told(blocks: Iterator[TokenBlock]) -> list[Any]:
    return [(b.tokens_BT.tolist(), b.targets_BT.tolist(), b.begins, b.position) for b in blocks]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


class Notes:
    """Lanes that note what they are asked for and where, and fail at some block."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.lanes, self.fails_at = lanes(), fails_at
        self.asked: list[int] = []
        self.threads: set[str] = set()
        self.begun = threading.Semaphore(0)

    def next(self, position: LanePosition) -> TokenBlock | None:
        self.asked.append(position.blocks)
        self.threads.add(threading.current_thread().name)
        self.begun.release()
        if position.blocks == self.fails_at:
            raise ValueError("the file is cut short")
        return self.lanes.next(position)


@pytest.fixture
def _plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of pinned memory, asked for where the training is; every element has to be written."""

    def memory(num_tokens: int) -> torch.Tensor:
        assert threading.current_thread() is threading.main_thread()
        return torch.full((num_tokens,), -1)

    monkeypatch.setattr(prefetch, "_pinned_memory", memory)


@pytest.mark.usefixtures("_plain_memory")
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize("jitter", [False, True])
@pytest.mark.parametrize("at_end", ["restart", "stop"])
def test_the_same_blocks_in_the_same_order(device: torch.device, jitter: bool, at_end: Any) -> None:
    """Through several ends of the text, or to the last block, which is shorter."""
    expected = told(islice(walk(lanes(jitter=jitter, at_end=at_end)), 40))
    with blocks_ahead(lanes(jitter=jitter, at_end=at_end), device) as blocks:
        assert told(islice(walk(blocks), 40)) == expected
        assert told(islice(walk(blocks, expected[2][3]), 3)) == expected[3:6]  # as after compile warm-up


@pytest.mark.usefixtures("_plain_memory")
def test_a_block_stays_as_it_is_while_others_are_prepared() -> None:
    with blocks_ahead(lanes(), GPU) as blocks:
        kept = list(islice(walk(blocks), 12))
    assert told(iter(kept)) == told(islice(walk(lanes()), 12))
    assert all(block.tokens_BT.is_contiguous() and block.targets_BT.is_contiguous() for block in kept)


def test_the_next_block_is_prepared_before_it_is_asked_for() -> None:
    notes = Notes()
    with blocks_ahead(notes) as blocks:
        first = blocks.next(Lanes.start)
        assert first is not None
        assert notes.begun.acquire(timeout=10)
        assert notes.begun.acquire(timeout=10)
        blocks.next(first.position)
    assert notes.asked[:2] == [0, 1]
    assert len(notes.threads) == 1
    assert threading.main_thread().name not in notes.threads


def test_what_goes_wrong_is_raised_where_the_block_is_asked_for() -> None:
    with blocks_ahead(Notes(fails_at=2)) as blocks:
        walking = walk(blocks)
        assert len(list(islice(walking, 2))) == 2
        with pytest.raises(ValueError, match="cut short"):
            next(walking)
    assert threads() == []


def test_what_goes_wrong_with_a_block_that_nobody_asks_for_is_nothing() -> None:
    with blocks_ahead(Notes(fails_at=2)) as blocks:
        assert len(list(islice(walk(blocks), 2))) == 2
    assert threads() == []


class Threads(Reporter):
    """How many prepare blocks, at every step."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def status(self, text: str, fraction: float) -> None:
        if "step" in text:
            self.seen.add(len(threads()))


def test_one_thread_while_a_run_lasts(text: Path, tmp_path: Path) -> None:
    seen = Threads()
    config = small_config(text, stage__0__steps=3, stage__1__steps=1, training__compile_warmup=2)
    train(config, tmp_path / "run", reporter=seen)
    assert seen.seen == {1}
    assert threads() == []


def test_no_thread_is_left_when_a_run_is_stopped(text: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(small_config(text), tmp_path / "run", reporter=Signals("train step 3 ", signal.SIGINT))
    assert threads() == []


def test_no_thread_is_left_when_a_step_fails(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        assert len(threads()) == 1
        raise RuntimeError("no more")

    monkeypatch.setattr(Updater, "update", fail)
    with pytest.raises(RuntimeError, match="no more"):
        train(small_config(text), tmp_path / "run")
    assert threads() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_for_a_gpu_blocks_are_pinned() -> None:
    with blocks_ahead(lanes(jitter=True), GPU) as blocks:
        for block in islice(walk(blocks), 5):
            assert block.tokens_BT.is_pinned()
            assert block.targets_BT.is_pinned()
            assert block.targets_BT.pin_memory().data_ptr() == block.targets_BT.data_ptr()
