"""Steps on a GPU without the time it takes to launch them: the passes through the model are captured once.

A CUDA graph repeats the same operations on the same memory. So a recording is good as long as the shapes that
go in and the model's `shape_key` stay the same: when they have for a few steps, forward and backward pass are
captured, and then replayed until something changes. A replay draws the random numbers that launching would
have drawn, so a run goes through the same weights whenever its recordings are made.

What a model has learned may be part of its `shape_key`, and then the key of a step is known only when the
device has done the step before. The host does not wait for that: steps are replayed speculatively, and rolled
back if the key has changed.

A model that cannot be captured is launched, step by step, after one warning.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from longspan.cuda_graphs import capture
from longspan.models.interface import LanguageModel
from longspan.state import State

STEADY = 2  # steps of one key before it is worth a recording


class RecordedModel:
    """`model(tokens, state)`, replayed where it can be.

    Gradients go to the parameters as always. What comes out of a replay lies in memory of the recording: it
    holds until the next call.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._own: Hashable = None
        self._shapes: Hashable = None
        self._seen = 0
        self._recording: _Recording | None = None
        self._can_record = True
        gc.collect()  # models before this one may be garbage that still holds graphs and memory

    def __call__(
        self, tokens_BT: Tensor, state: State, autocast: AbstractContextManager[Any]
    ) -> tuple[Tensor, State]:
        if not self._can_record:
            return self._launched(tokens_BT, state, autocast)
        leaves = state.flatten()
        shapes = (tuple(tokens_BT.shape), tuple((name, tuple(leaf.shape)) for name, leaf in leaves.items()))
        if self._recording is not None and shapes == self._shapes:
            randomness = _generator(tokens_BT.device).get_state()
            replayed = self._recording(tokens_BT, state)
            if self.model.shape_key(state) == self._own:
                return replayed
            del replayed  # and with it what holds the recording
            _generator(tokens_BT.device).set_state(randomness)
            state = self._recording.state.map(torch.clone)  # the one that came in may have been replayed over
        own = self.model.shape_key(state)
        if own is None:
            return self._launched(tokens_BT, state, autocast)
        if (own, shapes) != (self._own, self._shapes):
            self._own, self._shapes, self._seen, self._recording = own, shapes, 0, None
        self._seen += 1
        if self._seen == STEADY:
            # A clone may have other strides, for which compiled code is compiled anew. This launch compiles
            # what the capture will run: compiling during a capture invalidates it.
            tokens_BT, state = tokens_BT.clone(), state.map(torch.clone)
        if self._seen > STEADY:
            self._recording = self._recorded(tokens_BT, state, autocast)
        if self._recording is None:
            return self._launched(tokens_BT, state, autocast)
        return self._recording(tokens_BT, state)

    def _recorded(
        self, tokens_BT: Tensor, state: State, autocast: AbstractContextManager[Any]
    ) -> _Recording | None:
        """None if it failed, and then it is not tried again: random numbers are as if it had not been."""
        randomness = _generator(tokens_BT.device).get_state()
        try:
            return _Recording(self.model, tokens_BT, state, autocast)
        except Exception as problem:  # whatever a model does that cannot be captured, it can be launched
            reason = str(problem).strip().partition("\n")[0]
        _generator(tokens_BT.device).set_state(randomness)
        self._can_record = False
        gc.collect()  # what the failed capture holds
        warnings.warn(
            "the training step cannot be captured as a CUDA graph and is launched instead, which is slower: "
            f"{reason}",
            stacklevel=2,
        )
        return None

    def _launched(
        self, tokens_BT: Tensor, state: State, autocast: AbstractContextManager[Any]
    ) -> tuple[Tensor, State]:
        with autocast:
            hidden_BTD, after = self.model(tokens_BT, state)
        return hidden_BTD, after


class _Recording:
    """One forward and one backward pass."""

    def __init__(
        self, model: LanguageModel, tokens_BT: Tensor, state: State, autocast: AbstractContextManager[Any]
    ) -> None:
        self.tokens_BT, self.state = tokens_BT.clone(), state.map(torch.clone)
        self.parameters = [p for p in model.parameters() if p.requires_grad]

        def forward() -> tuple[Tensor, State]:
            with autocast:
                hidden_BTD, after = model(self.tokens_BT, self.state)
            return hidden_BTD, after

        self.forward_graph, (hidden_BTD, after) = capture(forward)
        self.after = after.detach()
        self.dhidden_BTD = torch.empty_like(hidden_BTD)
        self.backward_graph, self.gradients = capture(
            lambda: torch.autograd.grad(hidden_BTD, self.parameters, self.dhidden_BTD, allow_unused=True),
            pool=self.forward_graph.pool(),
        )
        self.hidden_BTD = hidden_BTD.detach()

    def __call__(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        inputs, leaves = self.state.flatten(), state.flatten()
        torch._foreach_copy_(
            [self.tokens_BT, *inputs.values()], [tokens_BT, *(leaves[name] for name in inputs)]
        )
        self.forward_graph.replay()
        # Autograd calls `_Replayed.backward` if anything that went in wants a gradient: a parameter does.
        hidden_BTD: Tensor = _Replayed.apply(self.parameters[0], self)  # type: ignore[no-untyped-call]
        return hidden_BTD, self.after

    def backward(self, dhidden_BTD: Tensor) -> None:
        """Replay, and add the gradients to what the parameters have from elsewhere."""
        self.dhidden_BTD.copy_(dhidden_BTD)
        self.backward_graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if gradient is not None:
                _accumulate(parameter, gradient)


def _generator(device: torch.device) -> torch.Generator:
    """Where random numbers on a device come from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, recording: _Recording) -> Tensor:
        ctx.recording = recording
        return recording.hidden_BTD.view_as(recording.hidden_BTD)

    @staticmethod
    def backward(ctx: Any, dhidden_BTD: Tensor) -> tuple[None, None]:
        ctx.recording.backward(dhidden_BTD)
        return None, None
