"""Sessions: texts that clients come back to, by id. A session is the state after its text.

Saved sessions are files of their own, `ID.session`, and are found again after a restart. Others live as long
as the server.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.errors import UserError
from longspan.serving.held_states import HeldState, HeldStates, write
from longspan.serving.jobs import log
from longspan.serving.limits import BadState, Limits, NoSuchSession, TooManySessions
from longspan.serving.state_file import (
    TEXT_TAIL,
    Facts,
    fingerprint,
    from_bytes,
    header_size,
    read_facts,
    to_bytes,
)

if TYPE_CHECKING:
    from longspan.language_model import LoadedModel
    from longspan.reading import TextState

SUFFIX = ".session"
_ID = re.compile(r"[A-Za-z0-9_-]{22}")


@dataclass(frozen=True)
class Session:
    """What is known of a session now."""

    id: str
    model: str
    tokens: int
    text_tail: str  # the last characters of the text
    created: float  # seconds since 1970
    last_used: float
    saved: bool  # whether a file has its current state
    in_memory: bool
    bytes: int  # of its state; shared by forks until they diverge. 0: not known before it is used


@dataclass
class _Entry:
    model: str
    held: HeldState
    created: float
    last_used: float
    saved: bool


class Sessions:
    """All sessions of a server, thread-safe. A state that a method returns stays valid whatever follows."""

    def __init__(self, models: Mapping[str, LoadedModel], limits: Limits, folder: Path | None = None) -> None:
        """`folder` is for saved sessions; without it none can be saved."""
        self._models, self._limits, self._folder = dict(models), limits, folder
        self._fingerprints = {name: fingerprint(lm) for name, lm in models.items()}
        self._lock = threading.RLock()
        self._entries: dict[str, _Entry] = {}
        self._files: dict[Path, HeldState] = {}  # saved files that a state may be read from
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._states = HeldStates(limits.session_bytes, folder)
        for path in sorted(folder.glob(f"*{SUFFIX}")) if folder is not None else ():
            self._find(path)

    def create(self, model: str, state: TextState, text_tail: str = "") -> Session:
        """A session after a text, whose last characters may be given to be shown."""
        with self._lock:
            self._check_room()
            now = time.time()
            return self._add(model, self._hold(model, state, text_tail, now), now, saved=False)

    def get(self, id: str) -> Session:
        with self._lock:
            return self._session(id, self._entry(id))

    def list(self) -> list[Session]:
        """All sessions, the last used first."""
        with self._lock:
            found = [self._session(id, entry) for id, entry in self._entries.items()]
        return sorted(found, key=lambda session: -session.last_used)

    def state(self, id: str) -> TextState:
        """The state, to continue from."""
        with self._lock:
            entry = self._entry(id)
            entry.last_used = time.time()
            return self._states.state(entry.held)

    def update(self, id: str, state: TextState, text_tail: str = "") -> Session:
        """The text of a session went on; a file that was saved keeps the state of that time."""
        with self._lock:
            entry = self._entry(id)
            new = self._hold(entry.model, state, text_tail, entry.created)
            self._states.release(entry.held)
            entry.held, entry.saved, entry.last_used = new, False, time.time()
            return self._session(id, entry)

    def fork(self, id: str) -> Session:
        """A further session at the same place of the text. Both share their state until they diverge."""
        with self._lock:
            entry = self._entry(id)
            self._check_room()
            entry.held.users += 1
            entry.last_used = time.time()
            return self._add(entry.model, entry.held, entry.last_used, saved=False)

    def delete(self, id: str) -> None:
        """Forget a session, and remove its file."""
        with self._lock:
            entry, path = self._entry(id), self._path(id)
            del self._entries[id]
            self._states.release(entry.held)
            if path is not None:
                with suppress(BadState):  # forks of a damaged file are lost too
                    self._detach_from(path)
                path.unlink(missing_ok=True)

    def save(self, id: str) -> Session:
        """Write the state to the folder: the session is found again after a restart."""
        with self._lock:
            entry, path = self._entry(id), self._path(id)
            if path is None:
                raise UserError("this server has no folder for sessions: start it with --sessions FOLDER")
            if not entry.saved:
                data = self._to_bytes(entry)
                self._detach_from(path)
                write(path, data)
                entry.saved = True
                if entry.held.file is None:
                    entry.held.file, self._files[path] = path, entry.held
            return self._session(id, entry)

    def export(self, id: str) -> bytes:
        """The state as a file to download."""
        with self._lock:
            return self._to_bytes(self._entry(id))

    def load(self, data: bytes, model: str) -> Session:
        """A new session from such a file."""
        if len(data) > self._limits.upload_bytes:
            raise BadState(f"a state of more than {self._limits.upload_bytes:,} bytes is not accepted")
        with self._lock:
            self._check_room()
        state, facts = from_bytes(data, self._models[model], self._fingerprints[model])
        return self.create(model, state, facts.text_tail)

    @property
    def memory_bytes(self) -> int:
        """Of all states in memory."""
        return self._states.bytes

    def close(self) -> None:
        """Forget all; saved ones stay on disk."""
        with self._lock:
            self._entries.clear()
            self._files.clear()
            self._states.close()

    def _find(self, path: Path) -> None:
        """A session that was saved before, if its model is served."""
        id = path.name.removesuffix(SUFFIX)
        if not _ID.fullmatch(id) or not path.is_file():
            return
        try:
            with path.open("rb") as file:
                first = file.read(8)
                facts = read_facts(first + file.read(header_size(first) - 8))
            used = path.stat().st_mtime
        except (UserError, OSError) as problem:
            log.warning("the session %s is left out: %s", path.name, problem)
            return
        model = next((name for name, own in self._fingerprints.items() if own == facts.fingerprint), None)
        if model is not None:
            held = HeldState(self._models[model], facts, None, path)
            self._entries[id], self._files[path] = _Entry(model, held, facts.created, used, saved=True), held

    def _detach_from(self, path: Path) -> None:
        """Before a saved file changes: forks of what it holds get it back into memory."""
        held = self._files.pop(path, None)
        if held is not None:
            if held.users:
                self._states.state(held)
            held.file = None

    def _entry(self, id: str) -> _Entry:
        if id not in self._entries:
            raise NoSuchSession("there is no such session")
        return self._entries[id]

    def _hold(self, model: str, state: TextState, text_tail: str, created: float) -> HeldState:
        shown = text_tail[-TEXT_TAIL:].encode("utf-8", "replace").decode()
        facts = Facts(self._fingerprints[model], state.tokens, state.tail, shown, created)
        return self._states.add(self._models[model], facts, state)

    def _add(self, model: str, held: HeldState, created: float, *, saved: bool) -> Session:
        id = secrets.token_urlsafe(16)
        self._entries[id] = _Entry(model, held, created, created, saved)
        return self._session(id, self._entries[id])

    def _to_bytes(self, entry: _Entry) -> bytes:
        facts = replace(entry.held.facts, created=entry.created)
        return to_bytes(self._states.state(entry.held), facts)

    def _check_room(self) -> None:
        if len(self._entries) >= self._limits.sessions:
            raise TooManySessions(f"there are {len(self._entries):,} sessions already: delete some first")

    def _path(self, id: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{id}{SUFFIX}"

    def _session(self, id: str, entry: _Entry) -> Session:
        held = entry.held
        return Session(
            id=id,
            model=entry.model,
            tokens=held.facts.tokens,
            text_tail=held.facts.text_tail,
            created=entry.created,
            last_used=entry.last_used,
            saved=entry.saved,
            in_memory=held.state is not None,
            bytes=held.bytes,
        )
