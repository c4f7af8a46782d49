"""Pay Attention when Required (Mandava, Migacz, Fit-Florea, 2020): a stack that learns its own pattern.

Every block is a `GumbelBlock` of all candidates. The learned result is a distribution over patterns. Blocks
are independent, so the probability of a pattern is the product over its letters.
Shapes: B blocks of the stack, K candidates.
"""

from __future__ import annotations

import heapq
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from longspan.config import RunConfig, SearchConfig
from longspan.errors import UserError
from longspan.flops import Shape, flops
from longspan.layers.block import Block
from longspan.layers.gumbel_block import GumbelBlock
from longspan.layers.temperature import Temperature, build_temperature
from longspan.models.pattern import Arrange, Makers
from longspan.models.stack import Stack
from longspan.registry import ARCHITECTURES


def supernet(config: RunConfig, vocabulary_size: int) -> Supernet:
    """The model of a search; the candidates are block kinds of `config.model`."""
    search = config.search
    assert search is not None
    steps = search.anneal_steps
    if steps is None:
        anneals = search.temperature_schedule not in ("learned", "constant")
        if anneals and any(stage.epochs for stage in config.stage):
            raise UserError("the length of a stage is given in epochs: give search.anneal_steps, too")
        steps = sum(stage.steps or 0 for stage in config.stage)
    temperature = build_temperature(search, max(1, steps))

    def arrange(makers: Makers) -> list[Block]:
        missing = next((letter for letter in search.candidates if letter not in makers), None)
        if missing is not None:
            raise UserError(f"{config.architecture} has no block '{missing}': remove it from the candidates")
        return [
            GumbelBlock(
                {letter: makers[letter]() for letter in search.candidates}, temperature, search.sampling
            )
            for _ in range(search.num_blocks)
        ]

    model = Supernet(_build_stack(config, vocabulary_size, arrange), temperature, search)
    shape = Shape(config.training.batch_size, config.training.block_length)
    model.set_costs({letter: flops(block, shape) for letter, block in model.candidates().items()})
    return model


class Supernet(Stack):
    """A stack of Gumbel blocks with learned probabilities of their candidates.

    In evaluation the blocks are mixtures ("soft"). With `evaluating("hard")` each block is its most likely
    candidate, so the model is the one that `pattern()` describes.
    """

    costs_K: Tensor

    def __init__(self, stack: Stack, temperature: Temperature, search: SearchConfig) -> None:
        super().__init__(
            stack.embedding,
            [block for block in stack.blocks if isinstance(block, GumbelBlock)],
            stack.head,
            shared={**dict(stack.shared.items()), "temperature": temperature},
            final_norm=stack.final_norm,
            dropout=stack.dropout,
            inputs=stack.input_layers(),
        )
        self.block_invariant = stack.block_invariant
        self.letters = search.candidates
        self.cost_weight = search.cost_weight
        self._temperature = (temperature,)  # `shared` has registered it
        self.register_buffer("costs_K", torch.zeros(len(self.letters)))

    def probabilities_BK(self) -> Tensor:
        """The probability of each candidate in each block, in the order of `letters`."""
        return torch.stack([block.logits_K for block in self._gumbel_blocks()]).softmax(dim=-1)

    def pattern(self) -> str:
        """The most likely pattern."""
        return "".join(self.letters[k] for k in self._log_probabilities_BK().argmax(dim=-1).tolist())

    def top_patterns(self, number: int) -> list[tuple[str, float]]:
        """Up to `number` most likely patterns with their probabilities, best first."""
        log_BK, order_BK = self._log_probabilities_BK().sort(dim=-1, descending=True, stable=True)
        log_p, order = log_BK.tolist(), order_BK.tolist()
        best = (0,) * len(log_p)  # ranks: every block takes its most likely candidate
        # Best-first search. The successors of a pattern replace the candidate of one block by its next one,
        # only at or after the last changed block: so every pattern is reached once, after all likelier ones.
        queue = [(-sum(ranked[0] for ranked in log_p), best, 0)]
        found: list[tuple[str, float]] = []
        while queue and len(found) < number:
            cost, ranks, last = heapq.heappop(queue)
            found.append(("".join(self.letters[order[b][r]] for b, r in enumerate(ranks)), math.exp(-cost)))
            for b in range(last, len(ranks)):
                r = ranks[b] + 1
                if r < len(self.letters):
                    step = log_p[b][r - 1] - log_p[b][r]
                    heapq.heappush(queue, (cost + step, (*ranks[:b], r, *ranks[b + 1 :]), b))
        return found

    @contextmanager
    def evaluating(self, choice: Literal["soft", "hard"]) -> Iterator[None]:
        """Inside, blocks are evaluated as mixtures ("soft") or as their most likely candidate ("hard")."""
        before = [block.chosen for block in self._gumbel_blocks()]
        chosen = self.pattern() if choice == "hard" else [None] * len(before)
        try:
            for block, letter in zip(self._gumbel_blocks(), chosen, strict=True):
                block.chosen = letter
            yield
        finally:
            for block, letter in zip(self._gumbel_blocks(), before, strict=True):
                block.chosen = letter

    def architecture_parameters(self) -> list[nn.Parameter]:
        """The logits of all blocks, which decide the pattern, and the temperature if it is learned."""
        logits = [block.logits_K for block in self._gumbel_blocks()]
        return [*logits, *self._temperature[0].parameters()]

    def weight_parameters(self) -> list[nn.Parameter]:
        """All other parameters."""
        architecture = {id(parameter) for parameter in self.architecture_parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in architecture]

    def candidates(self) -> dict[str, Block]:
        """The candidates of the first block; those of all others cost the same."""
        first = self._gumbel_blocks()[0]
        return {letter: block for letter, block in first.candidates.items() if isinstance(block, Block)}

    def set_costs(self, costs: Mapping[str, float]) -> None:
        """Set the cost of each candidate, in any unit. Costs are saved with the weights."""
        self.costs_K.copy_(torch.tensor([costs[letter] for letter in self.letters]))

    def penalties(self) -> dict[str, Tensor]:
        if self.cost_weight == 0:
            return super().penalties()
        expected = (self.probabilities_BK() @ self.costs_K.to(self._gumbel_blocks()[0].logits_K.dtype)).mean()
        return {**super().penalties(), "search_cost": self.cost_weight * expected / self.costs_K.max()}

    def diagnostics(self) -> dict[str, Tensor]:
        return {**super().diagnostics(), "architecture_BK": self.probabilities_BK().detach()}

    def records(self) -> dict[str, dict[str, Any]]:
        architecture = {
            "temperature": self._temperature[0]().item(),
            "candidates": self.letters,
            "probabilities": self.probabilities_BK().tolist(),
        }
        return {**super().records(), "architecture": architecture}

    def _gumbel_blocks(self) -> list[GumbelBlock]:
        return [block for block in self.blocks if isinstance(block, GumbelBlock)]

    def _log_probabilities_BK(self) -> Tensor:
        logits_BK = torch.stack([block.logits_K.detach() for block in self._gumbel_blocks()])
        return logits_BK.double().log_softmax(dim=-1).cpu()


def _build_stack(config: RunConfig, vocabulary_size: int, arrange: Arrange) -> Stack:
    build = ARCHITECTURES[config.architecture].resolve()
    if "arrange" not in inspect.signature(build).parameters:
        raise UserError(
            f"{config.architecture} cannot be searched: its build function has no argument 'arrange'"
        )
    stack = build(config.model, vocabulary_size, arrange=arrange)
    if not isinstance(stack, Stack):
        raise UserError(
            f"{config.architecture} cannot be searched: its build function must return a longspan.Stack"
        )
    return stack
