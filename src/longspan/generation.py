"""Sampling text with carried state: every token is read once.

Shapes: B batch, T block, D width, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspan.cuda_graphs import capture
from longspan.errors import UserError
from longspan.reading import TextState, begin

if TYPE_CHECKING:
    from longspan.layers.block import Step
    from longspan.models.interface import LanguageModel
    from longspan.state import State


def generate(
    model: LanguageModel,
    prompt_ids: Sequence[int] | Tensor,
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Read a prompt and yield `tokens` new tokens, each as soon as it is sampled."""
    if model.training:
        raise ValueError("generation needs a model in evaluation mode: call model.eval() first")
    if len(prompt_ids) == 0:
        raise ValueError("generation needs a prompt of at least one token")
    check_sampling(tokens, temperature, top_k, top_p)
    yield from generate_from(
        model,
        begin(model, prompt_ids),
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=generator,
    )


@torch.no_grad()
def generate_from(
    model: LanguageModel,
    start: TextState,
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Continue a text from its state."""
    for token, _ in sample_from(
        model,
        start,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=generator,
    ):
        yield token


@torch.no_grad()
def sample_from(
    model: LanguageModel,
    start: TextState,
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    generator: torch.Generator | None = None,
) -> Iterator[tuple[int, float]]:
    """Continue a text from its state: each token with its log-probability, which is that of the model.

    Temperature, filters and penalty change only what is sampled. The penalty multiplies the log-probabilities
    of all tokens that were generated before. Sampling uses a CPU generator, so a seed gives the same draws on
    every device.
    """
    log_probs_BV, device = model.head.log_probs(start.hidden_D[None, None])[:, 0], start.hidden_D.device
    decoder = Decoder(model, start.state)
    generated = set[int]()
    for remaining in reversed(range(tokens)):
        log_probs_BV = log_probs_BV.cpu()
        scores_BV = _penalised(log_probs_BV, generated, repetition_penalty)
        drawn_B = sample(scores_BV, temperature, top_k, top_p, generator)
        token = int(drawn_B)
        generated.add(token)
        yield token, float(log_probs_BV[0, token])
        if remaining:
            log_probs_BV = decoder.read(drawn_B[:, None].to(device))


class Decoder:
    """Reads one token at a time for each row of a batch, starting from a state.

    Single tokens are dominated by overhead, so a model may have a special step for them, `step_from`. On a
    GPU it is captured as a CUDA graph and replayed for every further token. A model without `step_from` uses
    `forward`, which is captured once the shapes of its state stay the same.
    """

    def __init__(self, model: LanguageModel, state: State) -> None:
        self._model = model
        self._step: Step | None = None
        self._captured: _CapturedStep | None = None
        self._steady, self._can_capture = False, True
        device = next(model.parameters()).device.type
        # Inference mode saves a tenth of the time on a CPU; its outputs cannot be changed in place.
        self._without_gradients = torch.inference_mode if device == "cpu" else torch.no_grad
        if not model.training and not torch.is_autocast_enabled(device):
            with self._without_gradients():
                self._step = self._first_step(state)
        if self._step is None:
            self._without_gradients = torch.no_grad
            self._state = model.decoding_state(state)

    def _first_step(self, state: State) -> Step | None:
        return self._model.step_from(state)

    def read(self, tokens_B1: Tensor) -> Tensor:
        """Log-probabilities of the next token; the next call overwrites them."""
        with self._without_gradients():
            if self._captured is None and self._steady:
                self._captured = self._try_capture(tokens_B1)
            if self._captured is not None:
                return self._captured(tokens_B1)
            if self._step is not None:
                # Captured from the second token on: the first one compiles kernels.
                self._steady = self._can_capture and _on_gpu(tokens_B1)
                return self._launch(tokens_B1)
            log_probs_BV, after = _read(self._model, tokens_B1, self._state)
            can_capture = (
                self._can_capture and _on_gpu(tokens_B1) and self._model.shape_key(after) is not None
            )
            self._steady = can_capture and _shapes(after) == _shapes(self._state)
            self._state = after
            return log_probs_BV

    def _try_capture(self, tokens_B1: Tensor) -> _CapturedStep | None:
        """A captured step. If capture fails: None, after a warning, and every token is launched."""
        try:
            return self._capture(tokens_B1)
        except Exception as problem:  # any model can be launched
            reason = str(problem).strip().partition("\n")[0]
        self._can_capture = False
        warnings.warn(
            f"decoding cannot be captured as a CUDA graph and is launched instead, which is slower: {reason}",
            stacklevel=3,
        )
        return None

    def _capture(self, tokens_B1: Tensor) -> _CapturedStep:
        if self._step is not None:
            return _CapturedStep(self._launch, tokens_B1)
        self._state = self._state.map(torch.clone)
        return _CapturedStep(self._next, tokens_B1)

    def _launch(self, tokens_B1: Tensor) -> Tensor:
        assert self._step is not None
        return self._model.head.log_probs(self._step(tokens_B1.t()))[0]

    def _next(self, tokens_B1: Tensor) -> Tensor:
        """Read a token and write the new state over the old one."""
        log_probs_BV, after = _read(self._model, tokens_B1, self._state)
        leaves = after.flatten()
        for name, leaf in self._state.flatten().items():
            leaf.copy_(leaves[name])
        return log_probs_BV


class _CapturedStep:
    """`read`, captured as a CUDA graph."""

    def __init__(self, read: Callable[[Tensor], Tensor], tokens_B1: Tensor) -> None:
        self.tokens_B1 = tokens_B1.clone()
        self.graph, self.log_probs_BV = capture(lambda: read(self.tokens_B1))

    def __call__(self, tokens_B1: Tensor) -> Tensor:
        self.tokens_B1.copy_(tokens_B1)
        self.graph.replay()
        return self.log_probs_BV


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _shapes(state: State) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in state.flatten().items()}


def _penalised(log_probs_BV: Tensor, generated: set[int], penalty: float) -> Tensor:
    if penalty == 1 or not generated:
        return log_probs_BV
    scores_BV = log_probs_BV.clone()
    scores_BV[:, sorted(generated)] *= penalty
    return scores_BV


def sample(
    log_probs_BV: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sample one token per row; temperature 0 takes the most probable one."""
    if bool(log_probs_BV.isnan().any()):
        raise UserError(
            "the model's probabilities are not numbers (NaN): its weights are broken or too large"
        )
    if temperature == 0:
        return log_probs_BV.argmax(dim=-1)
    probs_BV = sampling_distribution(log_probs_BV, temperature, top_k, top_p)
    return torch.multinomial(probs_BV, 1, generator=generator).squeeze(1)


def sampling_distribution(
    log_probs_BV: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The distribution that tokens are sampled from.

    The temperature is applied first. Then only the `top_k` most probable tokens are kept, and of those the
    smallest set with total probability `top_p`. The rest is renormalised.
    """
    below_best_BV = log_probs_BV - log_probs_BV.amax(
        dim=-1, keepdim=True
    )  # avoids overflow at low temperatures
    scores_BV = (below_best_BV.double() / temperature).to(
        log_probs_BV.dtype
    )  # in float32 the temperature might be 0
    if top_k is None and (top_p is None or top_p == 1):
        return scores_BV.softmax(dim=-1)
    scores_BV, order_BV = scores_BV.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        scores_BV[:, top_k:] = -torch.inf
    probs_BV = scores_BV.softmax(dim=-1)
    if top_p is not None and top_p < 1:
        before_BV = probs_BV.cumsum(dim=-1) - probs_BV
        beyond_BV = before_BV >= top_p
        beyond_BV[:, 0] = False  # the most probable token stays, however small top_p is
        probs_BV = probs_BV.masked_fill(beyond_BV, 0.0)
        probs_BV = probs_BV / probs_BV.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs_BV).scatter(-1, order_BV, probs_BV)


def check_sampling(
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    repetition_penalty: float = 1.0,
) -> None:
    """Raise `UserError` for invalid settings."""
    if tokens < 0:
        raise UserError(f"the number of tokens to generate must be 0 or more, not {tokens}")
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature must be 0 (always the most probable token) or more, not {temperature}")
    if top_k is not None and top_k < 1:
        raise UserError(f"top-k must be at least 1, not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top-p must be above 0 and at most 1, not {top_p}")
    if not 0 < repetition_penalty < float("inf"):
        raise UserError(
            f"the repetition penalty must be above 0 (1: none, above 1: fewer repetitions), "
            f"not {repetition_penalty}"
        )


def _read(model: LanguageModel, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
    """Log-probabilities after the last token of the block, and the state there."""
    hidden_BTD, state = model(tokens_BT, state)
    return model.head.log_probs(hidden_BTD[:, -1:])[:, 0], state
