"""Evaluation protocols: how held-out text is read, which tokens are scored, what the sum is divided by.

Every protocol splits the text into lanes that are read in parallel, each from an empty state. A lane that
starts at token s and scores n tokens reads tokens s ... s+n-1 and predicts tokens s+1 ... s+n. A protocol may
leave some of these predictions out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from longspan.errors import UserError


@dataclass(frozen=True)
class Lane:
    """A part of the text: it begins at token `start`, and the `length` tokens after it are scored.

    The first `warm` of them are only read. No protocol has such lanes; the context curve has.
    """

    start: int
    length: int
    warm: int = 0


@dataclass(frozen=True)
class EvaluationPlan:
    """The lanes of an evaluation, and its divisor.

    `unscored_every` = n: predictions n, 2n, 3n ... of every lane are left out; None: all are scored.
    """

    lanes: tuple[Lane, ...]
    divisor: int
    skipped_because: str
    unscored_every: int | None = None

    @property
    def tokens(self) -> int:
        """How many tokens are scored."""
        return self.tokens_before(self.longest)

    @property
    def longest(self) -> int:
        """The length of the longest lane."""
        return max(lane.length for lane in self.lanes)

    def tokens_before(self, position: int) -> int:
        """How many tokens are scored before `position` of all lanes."""
        read = (min(lane.length, position) for lane in self.lanes)
        warm = (min(lane.warm, position) for lane in self.lanes)
        return sum(map(self._scored, read)) - sum(map(self._scored, warm))

    def _scored(self, length: int) -> int:
        return length - length // (self.unscored_every or length + 1)


def every_token(num_tokens: int, batch_size: int, block_length: int) -> EvaluationPlan:
    """Every token is scored once, except the first, which has no context.

    The lanes have almost equal lengths; the longer ones come first.
    """
    _at_least(num_tokens, 2)
    pairs = num_tokens - 1
    num_lanes = min(batch_size, pairs)
    shorter, longer_lanes = divmod(pairs, num_lanes)
    lanes = tuple(
        Lane(b * shorter + min(b, longer_lanes), shorter + (b < longer_lanes)) for b in range(num_lanes)
    )
    return EvaluationPlan(lanes, pairs, "the first token has no context")


def adaptive_span(num_tokens: int, batch_size: int, block_length: int) -> EvaluationPlan:
    """Equal rows in full blocks; a rest that is shorter than a block and its target is not scored.

    All blocks have the same size, so the original's mean of block means is the mean over tokens.
    """
    _at_least(num_tokens, batch_size * (block_length + 1))
    row = num_tokens // batch_size
    blocks = (row - 1) // block_length
    lanes = tuple(Lane(b * row, blocks * block_length) for b in range(batch_size))
    return EvaluationPlan(
        lanes,
        batch_size * blocks * block_length,
        f"the first token of each row, and the rest after {blocks:,} full blocks",
    )


def transformer_xl(num_tokens: int, batch_size: int, block_length: int) -> EvaluationPlan:
    """Equal rows, the last block may be shorter: every token of a row except its first."""
    _at_least(num_tokens, 2 * batch_size)
    row = num_tokens // batch_size
    lanes = tuple(Lane(b * row, row - 1) for b in range(batch_size))
    return EvaluationPlan(
        lanes, batch_size * (row - 1), "the first token of each row, and the rest after equal rows"
    )


def sha_rnn(num_tokens: int, batch_size: int, block_length: int) -> EvaluationPlan:
    """Like `transformer_xl`, but divided by the length of the rows, although one token less is scored."""
    plan = transformer_xl(num_tokens, batch_size, block_length)
    return EvaluationPlan(plan.lanes, plan.tokens + batch_size, plan.skipped_because)


def fairseq(num_tokens: int, batch_size: int, block_length: int) -> EvaluationPlan:
    """The walk of `fairseq-eval-lm --task truncated_bptt_lm`.

    1. The tokens are cut into blocks of `block_length`; the last block may be shorter.
    2. Every row gets the same number of consecutive blocks; the blocks that remain are not read.
    3. A row is read block by block with carried state. Targets are shifted inside a block, so the first token
       of every block is read but never predicted.
    4. The sum is divided by the number of predictions.
    """
    blocks = -(-num_tokens // block_length)
    _at_least(num_tokens, max(2, (batch_size - 1) * block_length + 1))
    row_blocks = blocks // batch_size
    row = row_blocks * block_length
    lanes = tuple(Lane(b * row, min(row, num_tokens - b * row) - 1) for b in range(batch_size))
    why = "the first token of each block"
    if blocks % batch_size:
        why += f", and the last {blocks % batch_size:,} blocks, which do not fill the rows"
    plan = EvaluationPlan(lanes, 1, why, unscored_every=block_length)
    if plan.tokens == 0:
        raise UserError("no token is scored: with protocol fairseq a block needs at least 2 tokens")
    return replace(plan, divisor=plan.tokens)


PROTOCOLS: Mapping[str, Callable[[int, int, int], EvaluationPlan]] = {
    "every-token": every_token,
    "adaptive-span": adaptive_span,
    "transformer-xl": transformer_xl,
    "sha-rnn": sha_rnn,
    "fairseq": fairseq,
}


def _at_least(num_tokens: int, needed: int) -> None:
    if num_tokens < needed:
        raise UserError(
            f"{num_tokens:,} tokens are too few to score: this protocol, batch size and block length need "
            f"at least {needed:,}; use a longer text, fewer lanes or shorter blocks"
        )
