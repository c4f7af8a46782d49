"""Which tokens each protocol scores, against loops written from its description."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.errors import UserError
from longspan.evaluation.protocols import (
    PROTOCOLS,
    EvaluationPlan,
    adaptive_span,
    every_token,
    fairseq,
    sha_rnn,
    transformer_xl,
)

shapes = given(st.integers(2, 300), st.integers(1, 9), st.integers(1, 20))
few = settings(max_examples=60, deadline=None)


def targets(plan: EvaluationPlan) -> list[int]:
    every = plan.unscored_every
    return [
        lane.start + i for lane in plan.lanes for i in range(1, lane.length + 1) if every is None or i % every
    ]


@shapes
@few
def test_every_token_is_scored_exactly_once(num_tokens: int, batch_size: int, block_length: int) -> None:
    plan = every_token(num_tokens, batch_size, block_length)
    assert targets(plan) == list(range(1, num_tokens))
    assert plan.divisor == plan.tokens == num_tokens - 1
    assert len(plan.lanes) <= batch_size
    lengths = [lane.length for lane in plan.lanes]
    assert max(lengths) - min(lengths) <= 1


@shapes
@few
def test_adaptive_span_walks_until_no_block_fits(n_tokens: int, batch_size: int, block_length: int) -> None:
    row = n_tokens // batch_size
    if row < block_length + 1:
        with pytest.raises(UserError, match="too few to score"):
            adaptive_span(n_tokens, batch_size, block_length)
        return
    position, expected = 0, []
    while True:
        expected += [b * row + position + i + 1 for b in range(batch_size) for i in range(block_length)]
        position += block_length
        if position >= row - block_length:
            break
    plan = adaptive_span(n_tokens, batch_size, block_length)
    assert Counter(targets(plan)) == Counter(expected)
    assert plan.divisor == len(expected)


@shapes
@few
def test_the_other_originals_score_all_of_a_row_but_its_first(n: int, batch: int, block: int) -> None:
    row = n // batch
    if row < 2:
        with pytest.raises(UserError, match="too few to score"):
            transformer_xl(n, batch, block)
        return
    expected = []
    for position in range(0, row - 1, block):
        length = min(block, row - 1 - position)
        expected += [b * row + position + i + 1 for b in range(batch) for i in range(length)]
    assert Counter(targets(transformer_xl(n, batch, block))) == Counter(expected)
    assert Counter(targets(sha_rnn(n, batch, block))) == Counter(expected)
    assert transformer_xl(n, batch, block).divisor == len(expected)
    assert sha_rnn(n, batch, block).divisor == row * batch


def test_fairseq_by_hand() -> None:
    """13 tokens in blocks of 4 and 2 rows: blocks 0-3, 4-7 | 8-11, 12; nothing follows 12."""
    plan = fairseq(13, 2, 4)
    assert targets(plan) == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    assert plan.divisor == plan.tokens == 9
    assert plan.skipped_because == "the first token of each block"
    # 3 rows of 4 blocks: one block each, the last block is not read
    plan = fairseq(13, 3, 4)
    assert targets(plan) == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    assert "the last 1 blocks" in plan.skipped_because
    with pytest.raises(UserError, match="no token is scored"):
        fairseq(10, 2, 1)


@shapes
@few
def test_fairseq_shifts_targets_inside_blocks(n: int, batch: int, block: int) -> None:
    blocks = [list(range(i, min(i + block, n))) for i in range(0, n, block)]
    row = len(blocks) // batch
    rows = [blocks[b * row : (b + 1) * row] for b in range(batch)]
    expected = [token for blocks in rows for tokens in blocks for token in tokens[1:]]
    if not expected:
        with pytest.raises(UserError, match=r"too few to score|no token is scored"):
            fairseq(n, batch, block)
        return
    plan = fairseq(n, batch, block)
    assert targets(plan) == expected
    assert plan.divisor == plan.tokens == len(expected)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_single_token_cannot_be_scored(protocol: str) -> None:
    with pytest.raises(UserError, match="too few to score"):
        PROTOCOLS[protocol](1, 1, 1)
