"""Captures the forward and backward pass of a training step as CUDA graphs and replays them.

A CUDA graph repeats the same operations on the same memory, without the cost of launching each kernel. It is
valid while the input shapes and the model's `shape_key` stay the same. After a few such steps both passes are
captured, and then replayed until shapes or key change. A replay draws the same random numbers as launching
would, so the weights of a run do not depend on when graphs are captured.

Learned values, such as window sizes, may be part of `shape_key`. Then the key of a step is known only when
the device has finished the previous step. The host does not wait: steps are replayed speculatively, and
rolled back if the key changed.

A model that cannot be captured is launched instead, with one warning.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from longspan.cuda_graphs import capture
from longspan.hooks import add_penalty, added_penalties
from longspan.models.interface import LanguageModel
from longspan.state import State

STEADY = 2  # steps with the same key and shapes before a capture


class CapturedModel:
    """`model(tokens, state)`, replayed from a CUDA graph where possible.

    Gradients go to the parameters as usual. The outputs of a replay lie in the graph's own memory and are
    overwritten by the next call.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._key: Hashable = None
        self._shapes: Hashable = None
        self._seen = 0
        self._captured: _CapturedStep | None = None
        self._can_capture = True
        gc.collect()  # earlier models that are not yet collected may still hold graphs and memory

    def __call__(
        self, tokens_BT: Tensor, state: State, autocast: AbstractContextManager[Any]
    ) -> tuple[Tensor, State]:
        if not self._can_capture:
            return self._launch(tokens_BT, state, autocast)
        leaves = state.flatten()
        shapes = (tuple(tokens_BT.shape), tuple((name, tuple(leaf.shape)) for name, leaf in leaves.items()))
        if self._captured is not None and shapes == self._shapes:
            randomness = _generator(tokens_BT.device).get_state()
            replayed = self._captured(tokens_BT, state)
            if self.model.shape_key(state) == self._key:
                return _with_penalties(*replayed)
            del replayed  # it holds a reference to the captured graph
            _generator(tokens_BT.device).set_state(randomness)
            state = self._captured.state.map(torch.clone)  # the replay may have overwritten the input
        key = self.model.shape_key(state)
        if key is None:
            return self._launch(tokens_BT, state, autocast)
        if (key, shapes) != (self._key, self._shapes):
            self._key, self._shapes, self._seen, self._captured = key, shapes, 0, None
        self._seen += 1
        if self._seen == STEADY:
            # A clone may have other strides, and torch.compile recompiles for them. This launch compiles what
            # the capture will run, because compiling during a capture invalidates it.
            tokens_BT, state = tokens_BT.clone(), state.map(torch.clone)
        if self._seen > STEADY:
            self._captured = self._try_capture(tokens_BT, state, autocast)
        if self._captured is None:
            return self._launch(tokens_BT, state, autocast)
        return _with_penalties(*self._captured(tokens_BT, state))

    def _try_capture(
        self, tokens_BT: Tensor, state: State, autocast: AbstractContextManager[Any]
    ) -> _CapturedStep | None:
        """A captured graph. If capture fails: None, random generators restored, and no second attempt."""
        randomness = _generator(tokens_BT.device).get_state()
        try:
            return _CapturedStep(self.model, tokens_BT, state, autocast)
        except Exception as problem:  # any model can be launched
            reason = str(problem).strip().partition("\n")[0]
        _generator(tokens_BT.device).set_state(randomness)
        self._can_capture = False
        gc.collect()  # frees what the failed capture holds
        warnings.warn(
            "the training step cannot be captured as a CUDA graph and is launched instead, which is slower: "
            f"{reason}",
            stacklevel=2,
        )
        return None

    def _launch(
        self, tokens_BT: Tensor, state: State, autocast: AbstractContextManager[Any]
    ) -> tuple[Tensor, State]:
        with autocast:
            hidden_BTD, after = self.model(tokens_BT, state)
        return hidden_BTD, after


class _CapturedStep:
    """One forward and one backward pass, captured with buffers for their inputs."""

    def __init__(
        self, model: LanguageModel, tokens_BT: Tensor, state: State, autocast: AbstractContextManager[Any]
    ) -> None:
        self.tokens_BT, self.state = tokens_BT.clone(), state.map(torch.clone)
        self.parameters = [p for p in model.parameters() if p.requires_grad]

        def forward() -> tuple[Sequence[Tensor], State]:
            with autocast, added_penalties() as added:
                hidden_BTD, after = model(self.tokens_BT, self.state)
            return (hidden_BTD, *added), after

        self.forward_graph, (outputs, after) = capture(forward)
        self.after = after.detach()
        self.doutputs = [torch.empty_like(output) for output in outputs]
        self.backward_graph, self.gradients = capture(
            lambda: torch.autograd.grad(outputs, self.parameters, self.doutputs, allow_unused=True),
            pool=self.forward_graph.pool(),
        )
        self.outputs = [output.detach() for output in outputs]

    def __call__(self, tokens_BT: Tensor, state: State) -> tuple[Sequence[Tensor], State]:
        """Hidden states and penalties of the forward pass, and the state after the block."""
        inputs, leaves = self.state.flatten(), state.flatten()
        torch._foreach_copy_(
            [self.tokens_BT, *inputs.values()], [tokens_BT, *(leaves[name] for name in inputs)]
        )
        self.forward_graph.replay()
        # Autograd calls `_Replayed.backward` only if an input requires a gradient: so a parameter is passed.
        outputs: Sequence[Tensor] = _Replayed.apply(self.parameters[0], self)  # type: ignore[no-untyped-call]
        return outputs, self.after

    def backward(self, doutputs: Sequence[Tensor]) -> None:
        """Replay the backward pass and add its gradients to the parameters' gradients."""
        torch._foreach_copy_(self.doutputs, list(doutputs))
        self.backward_graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if gradient is not None:
                _accumulate(parameter, gradient)


def _with_penalties(outputs: Sequence[Tensor], after: State) -> tuple[Tensor, State]:
    """Hidden states and state; the penalties are added as the forward pass would add them."""
    hidden_BTD, *penalties = outputs
    for penalty in penalties:
        add_penalty(penalty)
    return hidden_BTD, after


def _generator(device: torch.device) -> torch.Generator:
    """The random generator of a device."""
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
    def forward(ctx: Any, _: Tensor, step: _CapturedStep) -> tuple[Tensor, ...]:
        ctx.step = step
        return tuple(output.view_as(output) for output in step.outputs)

    @staticmethod
    def backward(ctx: Any, *doutputs: Tensor) -> tuple[None, None]:
        ctx.step.backward(doutputs)
        return None, None
