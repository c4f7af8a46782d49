from __future__ import annotations

import dataclasses
import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.data import LanePosition, Lanes, TokenBlock, check_fits
from longspan.errors import UserError


def walk(lanes: Lanes, position: LanePosition | None = None):
    position = lanes.start if position is None else position
    while block := lanes.next(position):
        yield block
        position = block.position


def same(one: TokenBlock, other: TokenBlock) -> bool:
    return (
        torch.equal(one.tokens_BT, other.tokens_BT)
        and torch.equal(one.targets_BT, other.targets_BT)
        and (one.begins, one.position) == (other.begins, other.position)
    )


shapes = st.tuples(st.integers(1, 5), st.integers(1, 12), st.integers(0, 80))


@settings(max_examples=60, deadline=None)
@given(shapes, st.booleans(), st.integers(0, 3))
def test_an_epoch_visits_every_token_once_in_order(shape, jitter, seed):
    batch_size, block_length, extra = shape
    length = batch_size * (block_length + 1) + extra
    blocks = list(
        walk(Lanes(np.arange(length), batch_size, block_length, jitter=jitter, at_end="stop", seed=seed))
    )
    tokens = torch.cat([block.tokens_BT for block in blocks], 1)
    targets = torch.cat([block.targets_BT for block in blocks], 1)
    rows = np.arange(length // batch_size * batch_size).reshape(batch_size, -1)
    np.testing.assert_array_equal(tokens, rows[:, :-1])
    np.testing.assert_array_equal(targets, rows[:, 1:])
    assert [block.begins for block in blocks] == [True] + [False] * (len(blocks) - 1)


@settings(max_examples=60, deadline=None)
@given(shapes, st.booleans(), st.sampled_from(["restart", "stop"]), st.integers(0, 30))
def test_a_walk_goes_on_from_a_saved_position(shape, jitter, at_end, stop):
    batch_size, block_length, extra = shape
    tokens = np.arange(batch_size * (block_length + 1) + extra, dtype=np.uint16)

    def lanes() -> Lanes:
        return Lanes(tokens, batch_size, block_length, jitter=jitter, at_end=at_end, seed=3)

    whole = list(islice(walk(lanes()), 40))
    stop = min(stop, len(whole) - 1)
    saved = json.loads(json.dumps(dataclasses.asdict(whole[stop].position)))
    rest = list(islice(walk(lanes(), LanePosition(**saved)), 40 - stop - 1))
    assert len(rest) == len(whole) - stop - 1
    assert all(same(one, other) for one, other in zip(whole[stop + 1 :], rest, strict=True))


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(0, 5))
def test_restarting_follows_the_rule_of_adaptive_span(shape, seed):
    batch_size, block_length, extra = shape
    length = batch_size * (block_length + 1) + extra
    lane_length = length // batch_size
    offset, epoch = 0, 0
    for block in islice(walk(Lanes(np.arange(length), batch_size, block_length, seed=seed)), 50):
        here = int(block.tokens_BT[0, 0])
        if block.begins and block.position.blocks > 1:
            assert offset >= lane_length - block_length
            assert 0 <= here < block_length
            epoch += 1
        else:
            assert here == offset
            assert offset < lane_length - block_length
        assert block.tokens_BT.shape == (batch_size, block_length)
        expected = np.arange(batch_size)[:, None] * lane_length + here + np.arange(block_length)
        np.testing.assert_array_equal(block.tokens_BT, expected)
        np.testing.assert_array_equal(block.targets_BT, expected + 1)
        offset = here + block_length
        assert block.position == LanePosition(block.position.blocks, offset, epoch)


def test_restarts_are_at_different_offsets_and_depend_on_the_seed():
    def restarts(seed: int) -> list[int]:
        blocks = islice(walk(Lanes(np.arange(1000), 1, 100, seed=seed)), 300)
        return [int(block.tokens_BT[0, 0]) for block in blocks if block.begins]

    assert len(set(restarts(0))) > 20
    assert restarts(0) == restarts(0)
    assert restarts(0) != restarts(1)


def test_jitter_draws_lengths_as_sha_rnn_does():
    lengths = [b.tokens_BT.shape[1] for b in islice(walk(Lanes(np.zeros(40_000), 1, 100, jitter=True)), 4000)]
    share = Counter(length < 75 for length in lengths)[True] / len(lengths)
    assert 0.03 < share < 0.07  # about half as long with probability .05
    assert max(lengths) == 100
    assert 0.4 < lengths.count(100) / len(lengths) < 0.6  # the upper half of the bell is cut
    long = [length for length in lengths if 75 <= length < 100]
    assert 3.0 < 100 - np.mean(long) < 6.0  # what is below 100 lies about 0.8 standard deviations below
    assert min(length for length in lengths if length < 75) > 25


def test_jitter_never_goes_below_five_or_above_the_block():
    assert {b.tokens_BT.shape[1] for b in islice(walk(Lanes(np.zeros(999), 1, 6, jitter=True)), 200)} == {
        5,
        6,
    }
    assert {b.tokens_BT.shape[1] for b in islice(walk(Lanes(np.zeros(999), 1, 3, jitter=True)), 200)} == {3}


@pytest.mark.parametrize("jitter", [False, True])
def test_rows_of_all_ranks_together_are_the_batch(jitter):
    tokens = np.arange(500)
    whole = islice(walk(Lanes(tokens, 6, 10, jitter=jitter, seed=2)), 30)
    parts = [walk(Lanes(tokens, 6, 10, jitter=jitter, seed=2, rows=range(r, r + 2))) for r in (0, 2, 4)]
    for block in whole:
        pieces = [next(part) for part in parts]
        assert torch.equal(torch.cat([piece.tokens_BT for piece in pieces]), block.tokens_BT)
        assert torch.equal(torch.cat([piece.targets_BT for piece in pieces]), block.targets_BT)
        assert all(piece.position == block.position and piece.begins == block.begins for piece in pieces)


def test_blocks_are_int64_whatever_the_file_holds():
    block = Lanes(np.arange(100, dtype=np.uint8), 2, 5).next(Lanes.start)
    assert block.tokens_BT.dtype == block.targets_BT.dtype == torch.int64
    assert block.tokens_BT.is_contiguous()
    assert block.targets_BT.is_contiguous()


def test_text_smaller_than_one_block_is_one_clear_line():
    check_fits(np.zeros(44), 4, 10)
    with pytest.raises(
        UserError, match=r"the text has 43 tokens; one block of 4 lanes x 10 tokens needs 44: "
    ):
        Lanes(np.zeros(43), 4, 10)
