"""When torch.compile fails a run goes on without it, as if it had never been asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from longspan.compile_fallback import CompileFallback
from longspan.training import train

from .runs import outcome, small_config

SHORT = {"stage__0__steps": 8, "stage__1__steps": 4, "training__block_jitter": False}


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every compilation fail in its backend; one entry for each attempt."""
    plain, attempts = torch.compile, []

    def broken(graph: Any, inputs: Any) -> Any:
        attempts.append(1)
        raise RuntimeError("the compiler is broken")

    monkeypatch.setattr(torch, "compile", lambda function: plain(function, backend=broken))
    return attempts


def timeless(run: Path) -> Any:
    """The outcome of a run without what it was told."""
    left = outcome(run)
    return {name: value[1] if name in ("last", "best") else value for name, value in left.items()}


def test_a_run_whose_compiler_is_broken_is_the_run_without_it(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, evaluation, and Adagrad, whose update is compiled too."""
    train(small_config(text, **SHORT), tmp_path / "eager")
    attempts = without_compiler(monkeypatch)
    with pytest.warns(UserWarning, match="runs without it, which is slower: the compiler is broken$") as seen:
        train(small_config(text, training__compile=True, **SHORT), tmp_path / "run")
    assert len([w for w in seen if "torch.compile failed" in str(w.message)]) == 1
    assert attempts == [1]
    assert timeless(tmp_path / "run") == timeless(tmp_path / "eager")


def test_a_torch_that_cannot_compile_at_all(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("torch.compile is not supported here")

    train(small_config(text, **SHORT), tmp_path / "eager")
    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.warns(UserWarning, match="torch.compile failed.*is not supported here"):
        train(small_config(text, training__compile=True, **SHORT), tmp_path / "run")
    assert timeless(tmp_path / "run") == timeless(tmp_path / "eager")


def test_a_backward_pass_that_does_not_compile_is_repeated_whole() -> None:
    """Compiled lazily it fails after the forward pass has drawn its random numbers."""

    def no_backward(graph: Any, inputs: Any) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd

        def fail(graph: Any, inputs: Any) -> Any:
            raise TorchDynamoException("no backward pass")

        return aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=fail)(graph, inputs)

    def noisy(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5).sin()

    def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.ones(64, requires_grad=True)
        function(x).sum().backward()
        assert x.grad is not None
        return x.grad

    torch.compiler.reset()
    torch.manual_seed(3)
    expected = gradient(noisy)
    compiled = torch.compile(noisy, backend=no_backward)
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="torch.compile failed"):
        found = CompileFallback(enabled=True).run(lambda: gradient(compiled))
    assert torch.equal(found, expected)


def test_another_model_goes_on_compiled() -> None:
    """The fallback of one model is not that of another in the same process."""
    calls = []

    def counted(graph: Any, _: Any) -> Callable[..., Any]:
        calls.append(1)
        return graph.forward

    def broken(graph: Any, _: Any) -> Any:
        raise RuntimeError("the compiler is broken")

    torch.compiler.reset()
    failed, sound = CompileFallback(enabled=True), CompileFallback(enabled=True)
    with pytest.warns(UserWarning, match="the compiler is broken"):
        failed.run(lambda: torch.compile(lambda x: x + 1, backend=broken)(torch.ones(2)))
    result = sound.run(lambda: torch.compile(lambda x: x * 2, backend=counted)(torch.ones(2)))
    assert calls == [1]
    assert result.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("problem", [ValueError("mine"), torch.OutOfMemoryError("CUDA out of memory")])
def test_other_errors_are_not_taken_for_the_compilers(problem: Exception) -> None:
    def work() -> None:
        raise problem

    warnings.simplefilter("error")
    with pytest.raises(type(problem)):
        CompileFallback(enabled=True).run(work)


def test_nothing_is_forced_where_nothing_was_asked_for() -> None:
    """A model may compile parts of itself."""
    calls = []

    def counted(graph: Any, _: Any) -> Callable[..., Any]:
        calls.append(1)
        return graph.forward

    torch.compiler.reset()
    CompileFallback(enabled=False).run(lambda: torch.compile(lambda x: x - 1, backend=counted)(torch.ones(2)))
    assert calls == [1]
