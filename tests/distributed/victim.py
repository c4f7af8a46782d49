"""`longspan train` under torchrun, in processes that kill themselves with SIGKILL at planned moments.

    torchrun --max-restarts N ... -m tests.distributed.victim PLAN train RECIPE --out RUN --or-resume

A plan has one kill for every start of the processes. It is a rank, a moment, and the number of the call in
which it happens. `whole` in the plan are the words of a command that runs first and undisturbed.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longspan import distributed
from longspan.cli import main
from longspan.runs import RunFolder, sharded_checkpoint
from longspan.training import scoring
from longspan.training.journal import Journal
from longspan.training.records import Records
from longspan.training.step import Updater


class Death:
    """Writes down that a kill happens, and kills this process."""

    def __init__(self, notes: Path, kill: list[Any]) -> None:
        self._notes, self._kill = notes, kill

    def __call__(self, *_: Any, **__: Any) -> None:
        with self._notes.open("a") as file:
            file.write(json.dumps(self._kill) + "\n")
        os.kill(os.getpid(), signal.SIGKILL)


def wrap(owner: Any, name: str, number: int, before: Any = None, after: Any = None) -> None:
    """Call `before` or `after` when `owner.name` is called for the `number`-th time."""
    life: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def either(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        now = calls == number
        if now and before is not None:
            before(*args, **kwargs)
        result = life(*args, **kwargs)
        if now and after is not None:
            after(*args, **kwargs)
        return result

    setattr(owner, name, either)


def at_the_start(die: Death, number: int) -> None:
    die()


def after_the_folder_was_created(die: Death, number: int) -> None:
    wrap(RunFolder, "create", number, after=die)


def after_an_update(die: Death, number: int) -> None:
    wrap(Updater, "update", number, after=die)


def soon_after_an_update(die: Death, number: int) -> None:
    """At any moment of a tenth of a second."""

    def later(*_: Any, **__: Any) -> None:
        time.sleep(time.time_ns() % 1000 / 10_000)
        die()

    wrap(Updater, "update", number, after=lambda *_, **__: threading.Thread(target=later).start())


def in_the_middle_of_a_line(die: Death, number: int) -> None:
    def half(journal: Journal, line: Any) -> None:
        journal._file.write(b'{"kind": "tra')
        journal._file.flush()
        die()

    wrap(Journal, "write", number, before=half)


def in_an_evaluation(die: Death, number: int) -> None:
    wrap(scoring, "evaluate", number, before=die)


def before_a_shard(die: Death, number: int) -> None:
    wrap(sharded_checkpoint._Writer, "write_data", number, before=die)


def in_the_middle_of_a_shard(die: Death, number: int) -> None:
    def half(file: Path) -> None:
        os.truncate(file, file.stat().st_size // 2)
        die()

    class Dying(sharded_checkpoint.Shard):  # asked for the checksum of a file that was just written
        of = staticmethod(sharded_checkpoint.Shard.of)

    wrap(Dying, "of", number, before=half)
    sharded_checkpoint.Shard = Dying  # type: ignore[misc]


def in_the_middle_of_the_facts(die: Death, number: int) -> None:
    wrap(sharded_checkpoint, "contents", number, before=die)


def before_older_checkpoints_are_renamed(die: Death, number: int) -> None:
    wrap(sharded_checkpoint, "make_room", number, before=die)


def before_a_checkpoint_gets_its_name(die: Death, number: int) -> None:
    wrap(sharded_checkpoint, "make_room", number, after=die)


def before_older_checkpoints_are_removed(die: Death, number: int) -> None:
    wrap(sharded_checkpoint, "remove_oldest", number, before=die)


def after_a_rename(die: Death, number: int) -> None:
    wrap(os, "replace", number, after=die)


def before_a_rename(die: Death, number: int) -> None:
    wrap(os, "replace", number, before=die)


def after_the_final_line(die: Death, number: int) -> None:
    def if_final(records: Records, line: dict[str, Any]) -> None:
        if line["kind"] == "final":
            die()

    write = Records.write

    def both(records: Records, line: dict[str, Any]) -> None:
        write(records, line)
        if_final(records, line)

    Records.write = both  # type: ignore[method-assign]


def stopped_after_an_update(die: Death, number: int) -> None:
    """SIGSTOP instead: it is there, but does not answer."""
    wrap(Updater, "update", number, after=lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP))


def error_after_an_update(die: Death, number: int) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise LookupError("no such thing")

    wrap(Updater, "update", number, after=fail)


def full_disk_in_a_shard(die: Death, number: int) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    wrap(sharded_checkpoint._Writer, "write_data", number, before=fail)


def read_only_folder(die: Death, number: int) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    wrap(sharded_checkpoint._Writer, "set_up_storage_writer", number, before=fail)


if __name__ == "__main__":
    plan, words = Path(sys.argv[1]), sys.argv[2:]
    held = json.loads(plan.read_bytes())
    start = distributed.restarts()
    if start == 0 and "whole" in held and main(held["whole"]):
        sys.exit("the undisturbed run failed")
    if start < len(held["kills"]):
        rank, moment, number = held["kills"][start]
        if rank == distributed.rank():
            globals()[moment](Death(plan.with_suffix(".done"), [rank, moment, number]), number)
    sys.exit(main(words))
