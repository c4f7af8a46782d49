"""Trains the small run and kills its process with SIGKILL at a given moment.

A moment is a function that is about to return, or is half done, for the NUMBER-th time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longspan import files
from longspan.runs import checkpoint
from longspan.training import resume, scoring, train
from longspan.training.journal import Journal
from longspan.training.step import Updater

from .runs import small_config


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(number: int, death: Callable[..., Any], life: Callable[..., Any]) -> Callable[..., Any]:
    """`life`, until it is called for the `number`-th time."""
    calls = 0

    def either(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return death(*args, **kwargs) if calls == number else life(*args, **kwargs)

    return either


def after_an_update(number: int) -> None:
    update = Updater.update

    def death(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        die()

    Updater.update = dying(number, death, update)  # type: ignore[method-assign]


def in_the_middle_of_a_line(number: int) -> None:
    def death(journal: Journal, line: Any) -> None:
        journal._file.write(b'{"kind": "tra')
        journal._file.flush()
        die()

    Journal.write = dying(number, death, Journal.write)  # type: ignore[method-assign]


def in_the_middle_of_a_checkpoint(number: int) -> None:
    def death(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half of a checkpoint")
        die()

    checkpoint.save_file = dying(number, death, checkpoint.save_file)


def before_a_checkpoint_gets_its_name(number: int) -> None:
    class Dying:
        replace = staticmethod(dying(number, lambda *_: die(), os.replace))

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    files.os = Dying()  # type: ignore[assignment]


def in_an_evaluation(number: int) -> None:
    scoring.evaluate = dying(number, lambda *_, **__: die(), scoring.evaluate)


def train_or_resume(text: Path, run: Path, moment: str, number: int) -> None:
    if run.exists():
        globals()[moment](number)
        resume(run)
    else:
        config = small_config(text)
        globals()[moment](number)
        train(config, run)
