"""Models without weights, to count parameters and to compare shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# On the meta device torch imports its compiler for these, which takes seconds.
_SCALE_OR_FILL = (nn.init.normal_, Tensor.normal_, Tensor.div)


@contextmanager
def skeletons() -> Iterator[None]:
    """Inside, models are built on the meta device: their tensors have shapes and no values."""
    with torch.device("meta"), _ShapesAlone():
        yield


class _ShapesAlone(TorchFunctionMode):
    """Leaves out what takes long and changes no shape."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _SCALE_OR_FILL:
            first, *others = (*args, *given.values())
            if first.is_floating_point() and not any(isinstance(other, Tensor) for other in others):
                return first
        return func(*args, **given)
