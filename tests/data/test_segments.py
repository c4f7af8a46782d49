"""Segments: each once per epoch, in an order that seed and epoch decide, resumable anywhere."""

from __future__ import annotations

import dataclasses
import json
from itertools import groupby, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.config import RunConfig, TrainingConfig, schema
from longspan.data import LanePosition, Segments
from longspan.errors import UserError

from .test_lanes import same, walk

shapes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 120))


def segments(shape: tuple[int, int, int, int], **options) -> Segments:
    """Of tokens that are the numbers of their places."""
    batch_size, block_length, blocks, extra = shape
    length = block_length * blocks
    tokens = np.arange(batch_size * (length + 1) + extra)
    return Segments(tokens, batch_size, block_length, length, **options)


@settings(max_examples=80, deadline=None)
@given(shapes, st.integers(0, 3))
def test_a_pass_reads_segments_from_begin_to_end_and_none_twice(shape, seed):
    batch_size, block_length, blocks, _ = shape
    read = list(walk(segments(shape, at_end="stop", seed=seed)))
    assert [block.begins for block in read] == ([True] + [False] * (blocks - 1)) * (len(read) // blocks)
    for block in read:
        assert block.tokens_BT.shape == (batch_size, block_length)
        assert torch.equal(block.targets_BT, block.tokens_BT + 1)
    begins = []
    for group in zip(*[iter(read)] * blocks, strict=True):
        whole_BS = torch.cat([block.tokens_BT for block in group], 1)
        assert torch.equal(whole_BS, whole_BS[:, :1] + torch.arange(block_length * blocks))
        begins += whole_BS[:, 0].tolist()
    begins.sort()
    assert len({begin % (block_length * blocks) for begin in begins}) == 1
    assert len(set(begins)) == len(begins)


@settings(max_examples=40, deadline=None)
@given(shapes)
def test_less_than_a_batch_and_a_segment_is_left_over(shape):
    batch_size, block_length, blocks, extra = shape
    length = block_length * blocks
    read = len(list(walk(segments(shape, at_end="stop")))) * batch_size * block_length
    assert read > batch_size * (length + 1) + extra - (batch_size + 1) * length


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(0, 30))
def test_a_walk_goes_on_from_a_saved_position(shape, stop):
    whole = list(islice(walk(segments(shape, seed=3)), 40))
    saved = json.loads(json.dumps(dataclasses.asdict(whole[stop].position)))
    rest = list(islice(walk(segments(shape, seed=3), LanePosition(**saved)), 40 - stop - 1))
    assert all(same(one, other) for one, other in zip(whole[stop + 1 :], rest, strict=True))


def order(seed: int) -> list[list[int]]:
    """Where segments begin in the first three epoch."""
    blocks = list(islice(walk(segments((2, 5, 2, 400), seed=seed)), 3 * 42))
    begins = [(b.position.epoch, place) for b in blocks if b.begins for place in b.tokens_BT[:, 0].tolist()]
    return [[place for _, place in every] for _, every in groupby(begins, key=lambda begin: begin[0])]


def test_every_pass_and_every_seed_has_an_order_and_cuts_of_its_own():
    first, second, *_ = order(seed=1)
    assert first != sorted(first)
    assert first != second
    assert {place % 10 for place in first} != {place % 10 for place in second}
    assert order(seed=1) == order(seed=1) != order(seed=2)


def test_rows_of_all_ranks_together_are_the_batch():
    shape = (6, 5, 2, 300)
    parts = [walk(segments(shape, seed=2, rows=range(r, r + 2))) for r in (0, 2, 4)]
    for block in islice(walk(segments(shape, seed=2)), 30):
        pieces = [next(part) for part in parts]
        assert torch.equal(torch.cat([piece.tokens_BT for piece in pieces]), block.tokens_BT)
        assert all(piece.position == block.position and piece.begins == block.begins for piece in pieces)


def test_text_smaller_than_one_segment_is_one_clear_line():
    with pytest.raises(UserError, match=r"one segment of 4 lanes x 10 tokens needs 44: .* segment_length"):
        Segments(np.zeros(43), 4, 5, 10)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"segment_length": 0}, "multiple of block_length, 512"),
        ({"segment_length": 700}, "multiple of block_length, 512"),
        (
            {"segment_length": 1024, "block_jitter": True},
            "block_jitter cannot be combined with segment_length",
        ),
    ],
)
def test_settings_that_do_not_fit(options, problem):
    with pytest.raises(UserError, match=problem):
        schema.read(TrainingConfig, options)


def test_blocks_of_another_length_go_on_in_the_segment_if_they_fit_and_else_in_the_next():
    tokens = np.arange(400)
    fours, twos, sixes = (Segments(tokens, 2, block_length, 12) for block_length in (4, 2, 6))
    first = fours.next(LanePosition())
    two, six = twos.next(first.position), sixes.next(first.position)
    assert torch.equal(two.tokens_BT[:, 0], first.tokens_BT[:, 0] + 4)
    assert (two.begins, two.position.offset) == (False, 6)
    assert (six.begins, six.position.offset) == (True, 18)
    assert same(six, sixes.next(dataclasses.replace(first.position, offset=12)))


def test_blocks_of_a_stage_must_fit_segments_too():
    table = {
        "training": {"block_length": 4, "segment_length": 12},
        "stage": [{"name": "long", "steps": 1, "learning_rate": 0.1, "block_length": 8}],
    }
    with pytest.raises(UserError, match=r"12, must be a multiple of the block_length of stage 'long', 8"):
        schema.read(RunConfig, table)
