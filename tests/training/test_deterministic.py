"""`training.deterministic`: the mode is on while a run trains, and off again however it ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor

from longspan.errors import UserError
from longspan.training import Interrupted, resume, train
from longspan.training.deterministic import deterministic

from .runs import Signals, outcome, small_config


def modes() -> tuple[bool, bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        inductor.deterministic,
    )


def test_a_run_trains_in_that_mode_and_ends_with_the_same_bits(
    text: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    before, seen = modes(), []
    config = small_config(text, training__deterministic=True)
    reporter = Signals("train step 21 ", signal.SIGINT)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", reporter=reporter, callback=lambda line: seen.append(modes()))
    assert modes() == before
    resume(tmp_path / "run", callback=lambda line: seen.append(modes()))
    assert modes() == before
    assert len(seen) > 4
    assert set(seen) == {(True, False, False, True)}
    assert outcome(tmp_path / "run") == outcome(uninterrupted)


def test_the_mode_of_the_caller_comes_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the caller's choice stays
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = modes()
        with pytest.raises(ValueError, match="inside"), deterministic(True):
            raise ValueError("inside")
        assert modes() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_operation_that_has_no_such_version_is_named_in_one_line() -> None:
    """`put_` has none, on a CPU either."""
    complaint = r"^torch has no deterministic put_, .* set training.deterministic = false$"
    with pytest.raises(UserError, match=complaint), deterministic(True):
        torch.zeros(3).put_(torch.tensor([1]), torch.tensor([1.0]))
    assert not torch.are_deterministic_algorithms_enabled()


def test_without_it_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "use_deterministic_algorithms", pytest.fail)
    with deterministic(False):
        assert modes() == (False, False, True, False)
