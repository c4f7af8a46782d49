"""Processes that start at once: forks of a process that has imported Longspan.

A new interpreter takes three seconds to import it. Other tests start `python -m longspan` and torchrun.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.multiprocessing.spawn import start_processes

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["longspan.training", "longspan.language_model", "longspan.cli"])


def start(
    function: Callable[..., Any], *arguments: Any, out: Path | None = None, err: Path | None = None
) -> BaseProcess:
    """Call a function in a fork, in this folder and with these variables; its result is the exit status."""
    streams = {number: str(path) for number, path in ((1, out), (2, err)) if path is not None}
    process = _server.Process(target=_child, args=(_here(), streams, function, arguments), daemon=True)
    process.start()
    return process


def finish(process: BaseProcess, seconds: float = 120) -> int:
    """Wait for its end. Returns the exit status; the negative number of a signal that ended it."""
    process.join(seconds)
    status = process.exitcode
    if status is None:
        process.kill()
        raise TimeoutError(f"the process still runs after {seconds:g} s")
    return status


def spawn(function: Callable[..., Any], arguments: tuple[Any, ...], processes: int) -> None:
    """Call `function(number, *arguments)` in so many forks. If one fails, the others are ended."""
    start_processes(_numbered, (_here(), function, arguments), nprocs=processes, start_method="forkserver")


def ranks(processes: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Call `function(*arguments)` in so many forks, with the variables that torchrun would set."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as in the agent of torchrun
    variables = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    spawn(_rank, (variables, function, arguments), processes)


def longspan(*words: str) -> int:
    """The command."""
    from longspan.__main__ import main

    sys.argv = ["longspan", *words]
    return main()


def program(text: str) -> None:
    """A program, as `python -c` would run it."""
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})


def _here() -> tuple[dict[str, str], str]:
    return dict(os.environ), os.getcwd()


def _go(there: tuple[dict[str, str], str]) -> None:
    variables, folder = there
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _numbered(
    number: int,
    there: tuple[dict[str, str], str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    _go(there)
    function(number, *arguments)


def _rank(
    number: int, variables: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(variables | {"RANK": str(number), "LOCAL_RANK": str(number)})
    function(*arguments)


def _child(
    there: tuple[dict[str, str], str],
    streams: dict[int, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    _go(there)
    for number, path in streams.items():
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.exit(function(*arguments))
