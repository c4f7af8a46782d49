"""Parameters as an update sees them: whole tensors, or the shards of this rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from longspan.distributed import is_sharded, local


def with_gradients(parameters: Iterable[Tensor]) -> Iterator[tuple[list[Tensor], bool]]:
    """The parameters that have gradients: those that are whole, then those that are sharded (true)."""
    having = [p for p in parameters if p.grad is not None]
    for sharded in (False, True):
        found = [p for p in having if is_sharded(p) is sharded]
        if found:
            yield found, sharded


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [local(p.grad) for p in parameters if p.grad is not None]
