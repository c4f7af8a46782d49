"""From the options of `longspan serve` to what is served."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longspan.errors import UsageError, UserError
from longspan.home import home
from longspan.inspection.report.data import run_data
from longspan.language_model import load
from longspan.private_folder import is_private
from longspan.serving.engine import Engine
from longspan.serving.http.gate import LOCAL, Rules
from longspan.serving.http.service import Served, Service
from longspan.serving.limits import Limits
from longspan.serving.sessions import Sessions

_BODY = 1 << 20  # bytes that a request may have besides its prompt
_BODIES = 64  # of this size that may be in memory at once
_TOKEN = 32  # bytes of a token in JSON, at most, on average


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to serve."""

    folders: Sequence[Path]
    watched: Sequence[Path] = ()
    checkpoint: Literal["best", "last"] = "best"
    device: str = "auto"
    sessions: Path | None = None  # a folder; None: in LONGSPAN_HOME
    limits: Limits = Limits()  # noqa: RUF009


@contextmanager
def start(options: Options) -> Iterator[Service]:
    """Load the models; the engines are started by the server."""
    runs = named_runs([*options.folders, *options.watched])
    served_names = list(runs)[: len(options.folders)]
    for watched in options.watched:
        run_data(watched)  # a mistake in its name is found now
    folder = sessions_folder(options.sessions, make=False)
    models = {}
    for name in served_names:
        lm = load(runs[name], options.checkpoint, options.device)
        models[name] = Served(name, lm, Engine(lm, name, options.limits))
    sessions_folder(options.sessions)  # nothing is written before all is known to be right
    sessions = Sessions({name: served.lm for name, served in models.items()}, options.limits, folder)
    try:
        yield Service(models, sessions, options.limits, runs)
    finally:
        sessions.close()


def rules_for(limits: Limits, *, any_host: bool, origins: Collection[str], key: bytes | None) -> Rules:
    """Who may ask, and how large a request may be."""
    body = _BODY + _TOKEN * limits.prompt_tokens
    upload = min(limits.upload_bytes, _BODY + limits.session_bytes)
    return Rules(
        hosts=None if any_host else LOCAL,
        origins=tuple(origins),
        key=key,
        body_bytes=body,
        upload_bytes=upload,
        all_bytes=_BODIES * body + upload,
    )


def named_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Runs by the names of their folders; a name that is used already gets a number."""
    found: dict[str, Path] = {}
    seen = set[Path]()
    for folder in folders:
        place = folder.resolve()
        if place in seen:
            raise UsageError(f"{folder} is given twice: give it once")
        seen.add(place)
        name = wanted = place.name.encode("utf-8", "replace").decode() or "run"
        number = 1
        while name in found:
            number += 1
            name = f"{wanted}-{number}"
        found[name] = folder
    return found


def sessions_folder(given: Path | None, *, make: bool = True) -> Path:
    """The folder for saved sessions, which may hold private texts; without `make` it is only checked."""
    folder = home() / "sessions" if given is None else given
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is not a folder: choose another one with --sessions")
    if given is not None and not (above := folder.absolute().parent).is_dir():
        raise UserError(f"there is no folder {above}: create it, or choose another --sessions")
    if not make:
        return folder
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if given is None and not is_private(folder.resolve()):
        raise UserError(f"others can write to {folder}: choose a folder of your own with --sessions")
    return folder
