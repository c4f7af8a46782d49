"""States of sessions in memory, bounded in bytes: the least recently used ones go to disk and come back.

Sessions that were forked share one `HeldState` until they diverge, in memory and on disk.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from longspan.files import process_folder, whole_file
from longspan.reading import TextState
from longspan.serving.limits import BadState, SessionTooLarge
from longspan.serving.state_file import Facts, from_bytes, to_bytes

if TYPE_CHECKING:
    from longspan.language_model import LoadedModel


class HeldState:
    """A state in memory, or in a file, or both. Sessions count as its users."""

    def __init__(self, lm: LoadedModel, facts: Facts, state: TextState | None, file: Path | None) -> None:
        self.lm, self.facts = lm, facts
        self.state = state  # on the CPU
        self.file = file  # that has this state; not removed by us
        self.spilled: Path | None = None  # the same, ours
        self.users = 1
        self.bytes = 0 if state is None else _size(state)


class HeldStates:
    """All of them; not thread-safe."""

    def __init__(self, most_bytes: int, folder: Path | None) -> None:
        self._most = most_bytes
        self._folder, self._spill_folder = (
            folder,
            None if folder is None else process_folder(folder / "spilled"),
        )
        self._used: OrderedDict[int, HeldState] = OrderedDict()  # those in memory, the last used at the end
        self.bytes = 0  # in memory
        self._number = 0

    def add(self, lm: LoadedModel, facts: Facts, state: TextState) -> HeldState:
        """Hold a further state; others may go to disk for it."""
        held = HeldState(lm, facts, _compact(state), None)
        self._check(held.bytes)
        self._keep(held)
        return held

    def state(self, held: HeldState) -> TextState:
        """The state on the device of its model; it is now the last used one."""
        if held.state is None:
            path = held.spilled or held.file
            assert path is not None
            try:
                data = path.read_bytes()
            except OSError as problem:
                raise BadState(f"the file of this session cannot be read: {problem.strerror}") from None
            state, _ = from_bytes(data, held.lm, held.facts.fingerprint)
            held.state = _on("cpu", state)
            held.bytes = _size(held.state)
            self._check(held.bytes)
            self._keep(held)
        self._used.move_to_end(id(held))
        return _on(held.lm.device, held.state)

    def release(self, held: HeldState) -> None:
        """One session less uses it."""
        held.users -= 1
        if held.users == 0:
            if self._used.pop(id(held), None) is not None:
                self.bytes -= held.bytes
            if held.spilled is not None:
                held.spilled.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove what went to disk only to save memory."""
        if self._spill_folder is not None:
            shutil.rmtree(self._spill_folder, ignore_errors=True)

    def _check(self, size: int) -> None:
        if size > self._most:
            raise SessionTooLarge(
                f"a state of {size / 2**20:.1f} MiB is larger than the memory for sessions, "
                f"{self._most / 2**20:.1f} MiB"
            )

    def _keep(self, held: HeldState) -> None:
        self._used[id(held)] = held
        self.bytes += held.bytes
        while self.bytes > self._most:
            key, oldest = next(iter(self._used.items()))
            self._spill(oldest)
            del self._used[key]
            self.bytes -= oldest.bytes
            oldest.state = None

    def _spill(self, held: HeldState) -> None:
        if held.spilled is not None or held.file is not None:
            return
        if self._spill_folder is None:
            self._spill_folder = Path(tempfile.mkdtemp(prefix="longspan-sessions-"))
        assert held.state is not None
        self._number += 1
        path = self._spill_folder / f"{self._number}.safetensors"
        write(path, to_bytes(held.state, held.facts))
        held.spilled = path


def write(path: Path, data: bytes) -> None:
    """A whole file that only its owner can read."""
    with whole_file(path, mode=0o600) as partial:
        partial.write_bytes(data)


def _on(device: object, state: TextState) -> TextState:
    moved = state.state.to(device)  # type: ignore[arg-type]
    return TextState(moved, state.hidden_D.to(device), state.tail, state.tokens)  # type: ignore[call-overload]


def _compact(state: TextState) -> TextState:
    """On the CPU, without the memory that tensors share with larger ones."""

    def alone(leaf: Tensor) -> Tensor:
        leaf = leaf.detach().cpu()
        whole = leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()
        return leaf if whole else leaf.clone()

    return TextState(state.state.map(alone), alone(state.hidden_D), state.tail, state.tokens)


def _size(state: TextState) -> int:
    leaves = [state.hidden_D, *state.state.flatten().values()]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)
