"""Slots: texts that are continued together, and that come and go while the others go on.

The result of a text must not depend on the others, to the last bit. A product of few rows may be rounded in
another way than one of many, so only such batch sizes are used that were seen to give the same bits; in
between, rows without a text are computed too.

Shapes: B rows, N texts, V vocabulary.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from longspan.generation import Decoder
from longspan.models import LanguageModel
from longspan.serving.row_decoder import RowDecoder
from longspan.state import State

SIZES_CPU = (4, 8, 16, 32)
"""Batch sizes to try on a CPU. A product of fewer rows is rounded in another way."""

log = logging.getLogger("longspan.serving")

PATIENCE = 16  # tokens before the texts move to a smaller batch

_CHECKED = 3  # tokens read by every row to compare batch sizes


class Slots(ABC):
    """Texts under keys."""

    def __init__(self, model: LanguageModel, size: int) -> None:
        self.size = size
        self._model = model
        self._device = next(model.parameters()).device
        self._next_key = 0

    @abstractmethod
    def add(self, state: State) -> int:
        """Continue a text from its state; its key."""

    @abstractmethod
    def remove(self, key: int) -> None: ...

    @abstractmethod
    def launch(self, tokens: Mapping[int, int]) -> Callable[[], Tensor]:
        """Read one token of every text. The result waits for the log-probabilities of the next ones.

        They are [N, V] on the CPU, in the order of `tokens`. A GPU computes them meanwhile.
        """

    def read(self, tokens: Mapping[int, int]) -> Tensor:
        return self.launch(tokens)()

    def _key(self) -> int:
        self._next_key += 1
        return self._next_key


def make_slots(model: LanguageModel, size: int) -> Slots:
    """Slots that fit the model and its device."""
    if not has_fixed_shapes(model):
        return SeparateSlots(model, size)
    on_cpu = next(model.parameters()).device.type == "cpu"
    wanted = [rows for rows in SIZES_CPU if on_cpu and rows < size] + [size]
    sizes = alike_sizes(model, wanted)
    if not sizes and not on_cpu:
        log.warning("on this device a text may depend on its slot in the last bits")
        sizes = wanted  # separate texts would take as many times longer as there are
    return BatchedSlots(model, sizes) if sizes else SeparateSlots(model, size)


class BatchedSlots(Slots):
    """All texts are rows of one batch. If there are few, a smaller batch takes less time."""

    def __init__(self, model: LanguageModel, sizes: Sequence[int]) -> None:
        super().__init__(model, max(sizes))
        self._sizes = sorted(sizes)
        self._decoders: dict[int, RowDecoder] = {}
        self._rows: dict[int, int] = {}  # by key
        self._rows_used = self._sizes[0]
        self._small_for = 0  # tokens for which a smaller batch would have been enough
        if self._device.type != "cpu":  # compile and capture now, not when a client waits
            for _ in range(3):
                self._decoder(self._rows_used).read(
                    torch.zeros(self._rows_used, 1, dtype=torch.long, device=self._device)
                )

    @property
    def rows(self) -> int:
        """Of the current batch."""
        return self._rows_used

    def add(self, state: State) -> int:
        if len(self._rows) == self.size:
            raise ValueError("all slots are taken")
        self._move_to(self._needed(len(self._rows) + 1))
        decoder = self._decoder(self._rows_used)
        row = next(row for row in range(self._rows_used) if row not in self._rows.values())
        decoder.put(row, decoder.begin(state))
        key = self._key()
        self._rows[key] = row
        return key

    def remove(self, key: int) -> None:
        del self._rows[key]
        if not self._rows:
            self._rows_used = self._sizes[0]

    def launch(self, tokens: Mapping[int, int]) -> Callable[[], Tensor]:
        self._small_for = self._small_for + 1 if self._needed(len(self._rows)) < self._rows_used else 0
        if self._small_for > PATIENCE:
            self._move_to(self._needed(len(self._rows)), shrink=True)
        tokens_B = [0] * self._rows_used
        for key, token in tokens.items():
            tokens_B[self._rows[key]] = token
        tokens_B1 = torch.tensor(tokens_B, device=self._device)[:, None]
        log_probs_BV = self._decoder(self._rows_used).read(tokens_B1)
        rows = [self._rows[key] for key in tokens]
        return lambda: log_probs_BV.cpu()[rows]

    def _needed(self, texts: int) -> int:
        return next(rows for rows in self._sizes if rows >= texts)

    def _move_to(self, rows: int, *, shrink: bool = False) -> None:
        """Continue all texts in a batch of another size."""
        if rows == self._rows_used or (rows < self._rows_used and not shrink):
            return
        old, new = self._decoder(self._rows_used), self._decoder(rows)
        for row, key in enumerate(self._rows):
            new.put(row, old, self._rows[key])
            self._rows[key] = row
        self._rows_used, self._small_for = rows, 0

    def _decoder(self, rows: int) -> RowDecoder:
        if rows not in self._decoders:
            like = next(iter(self._decoders.values()), None)
            self._decoders[rows] = RowDecoder(self._model, begun(self._model, rows), like)
        return self._decoders[rows]


class SeparateSlots(Slots):
    """Every text on its own: for models whose state grows."""

    def __init__(self, model: LanguageModel, size: int) -> None:
        super().__init__(model, size)
        self._decoders: dict[int, Decoder] = {}

    def add(self, state: State) -> int:
        key = self._key()
        self._decoders[key] = Decoder(self._model, state)
        return key

    def remove(self, key: int) -> None:
        del self._decoders[key]

    def launch(self, tokens: Mapping[int, int]) -> Callable[[], Tensor]:
        found = [
            self._decoders[key].read(torch.tensor([[token]], device=self._device))
            for key, token in tokens.items()
        ]
        return lambda: torch.cat(found).cpu()


def alike_sizes(model: LanguageModel, sizes: Sequence[int]) -> list[int]:
    """Those batch sizes in which a row gives the same bits as in the largest one, in any of its rows.

    None if the result depends on the row.
    """
    largest, vocabulary = max(sizes), model.vocabulary_size
    numbers = torch.Generator().manual_seed(0)
    tokens_TB1 = torch.randint(vocabulary, (_CHECKED, largest, 1), generator=numbers)
    expected_BX = _read_all(model, tokens_TB1)
    if not torch.equal(_read_all(model, tokens_TB1.flip(1)).flip(0), expected_BX):
        return []
    alike = [
        rows
        for rows in sizes
        if rows < largest and torch.equal(_read_all(model, tokens_TB1[:, :rows]), expected_BX[:rows])
    ]
    return [*alike, largest]


def _read_all(model: LanguageModel, tokens_TB1: Tensor) -> Tensor:
    decoder = RowDecoder(model, begun(model, tokens_TB1.shape[1]))
    device = next(model.parameters()).device
    return torch.cat([decoder.read(tokens_B1.to(device)).cpu() for tokens_B1 in tokens_TB1], dim=1)


def begun(model: LanguageModel, rows: int) -> State:
    """The state of texts that have not begun. It takes the memory of one."""
    return model.initial_state(1).map(lambda leaf: leaf.expand(rows, *leaf.shape[1:]))


def has_fixed_shapes(model: LanguageModel) -> bool:
    """Whether the state of a text keeps its shapes, so that texts of any length can be rows of one batch."""
    state = model.initial_state(1)
    with torch.no_grad():
        _, after = model(torch.zeros(1, 3, dtype=torch.long, device=next(model.parameters()).device), state)
    shapes = [{name: leaf.shape for name, leaf in one.flatten().items()} for one in (state, after)]
    return shapes[0] == shapes[1]
