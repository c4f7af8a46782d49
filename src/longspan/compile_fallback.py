"""torch.compile with a fallback: after the first failure everything runs in eager mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from longspan import compiling

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(reason: str) -> Callable[[Function], Function]:
    """A decorator: `torch.compiler.disable`.

    It makes torch import its compiler, which takes about two seconds. So it does nothing in a command that
    compiles no model (see `longspan.__main__`).
    """
    if not compiling.possible:
        return lambda function: function
    return torch.compiler.disable(reason=reason)


class CompileFallback:
    """`torch.compile` for one model and its optimizers, with a fallback to eager mode.

    torch compiles when a function is first called with arguments of a new kind, and the backward pass
    possibly later. If that fails, the work is run again from its start without compiled code, and so is all
    later work. There is one warning.
    """

    def __init__(self, enabled: bool) -> None:
        """If not `enabled`, nothing is compiled."""
        self._enabled, self._failed = enabled, False

    def compile(self, wrap: Callable[[], object]) -> None:
        """Call `wrap`, which wraps functions with `torch.compile`."""
        if not self._enabled or self._failed:
            return
        try:
            wrap()
        except Exception as problem:  # torch.compile does not support this platform or Python version
            self._give_up(problem)

    def run(self, work: Callable[[], T]) -> T:
        """`work()`, which may call wrapped functions.

        If it is run again, random generators are restored first; `work` must reset anything else it changes.
        """
        if self._failed:
            with self.eager():
                return work()
        if not self._enabled:
            return work()
        randomness = _randomness()
        try:
            return work()
        except torch._dynamo.exc.TorchDynamoException as problem:
            self._give_up(problem)
        _restore(randomness)
        return self.run(work)

    def eager(self) -> AbstractContextManager[object]:
        """Inside, compiled functions run in eager mode, if this compiled any."""
        return torch.compiler.set_stance("force_eager") if self._enabled else nullcontext()

    def _give_up(self, problem: Exception) -> None:
        self._failed = True
        cause = getattr(problem, "inner_exception", problem)  # without torch's wrapper
        reason = str(cause).strip().partition("\n")[0] or type(cause).__name__
        message = f"torch.compile failed, and the model runs without it, which is slower: {reason}"
        warnings.warn(message, stacklevel=3)


def _randomness() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def _restore(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
