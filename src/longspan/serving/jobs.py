"""Jobs of an engine: a text to read, score or inspect, or a text to generate.

A job reads in bounded units, so that no other job waits for long. All methods except `cancel` are called by
the thread of the engine.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from longspan.language_model import seeded_generator
from longspan.serving.reading_work import Reading, read_text
from longspan.serving.request import Finished, Sampling, Token
from longspan.serving.sampling import Draws
from longspan.stop_strings import StopStrings

if TYPE_CHECKING:
    from longspan.language_model import LoadedModel
    from longspan.reading import TextState

T = TypeVar("T")

log = logging.getLogger("longspan.serving")


class Job(ABC):
    """Work that was given to an engine."""

    state: TextState | None = None  # after `Finished`, with keep_state: after all that was generated

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.is_cancelled = False

    def cancel(self) -> None:
        """End the job soon, with an event as always. From any thread; if it has ended nothing happens."""
        self.is_cancelled = True
        self._wake()

    @abstractmethod
    def read(self) -> int | None:
        """Do a unit of reading: its number of tokens; None if all is read."""

    @abstractmethod
    def fail(self, problem: Exception) -> None:
        """End with an error."""

    @abstractmethod
    def end_cancelled(self) -> None:
        """End because it was cancelled."""


class Cancelled(Exception):
    """What a job of reading ends with if it is cancelled."""


class ReadingJob(Job, Generic[T]):
    """Reads a text and hands over what was found."""

    def __init__(
        self, wake: Callable[[], None], reading: Reading[T], on_done: Callable[[T | Exception], None]
    ) -> None:
        super().__init__(wake)
        self._reading, self._on_done = reading, on_done

    def read(self) -> int | None:
        try:
            return next(self._reading)
        except StopIteration as end:
            self._tell(end.value)
            return None

    def fail(self, problem: Exception) -> None:
        self._tell(problem)

    def end_cancelled(self) -> None:
        self._tell(Cancelled("the client cancelled"))

    def _tell(self, found: T | Exception) -> None:
        try:
            self._on_done(found)
        except Exception:
            log.exception("a client's function failed")


class GenerateJob(Job):
    """Reads a prompt, is continued token by token, and at last reads what was generated if asked to."""

    def __init__(
        self,
        wake: Callable[[], None],
        lm: LoadedModel,
        reading: Reading[TextState],
        sampling: Sampling,
        on_event: Callable[[Token | Finished], None],
        *,
        keep_state: bool,
    ) -> None:
        super().__init__(wake)
        self.sampling, self.draws = sampling, Draws(sampling, seeded_generator(sampling.seed))
        self.start: TextState | None = None  # after the prompt
        self.key: int | None = None  # of its slot
        self._lm, self._on_event, self._keep_state = lm, on_event, keep_state
        self._reading = reading
        self._ids: list[int] = []
        self._end, self._stream = StopStrings(sampling.stop), lm.tokenizer.stream()
        self._finished: Finished | None = None
        self._events: list[Token | Finished] = []  # that the client has not got yet

    def read(self) -> int | None:
        try:
            return next(self._reading)
        except StopIteration as end:
            if self._finished is None:
                self.start = end.value
                for token in self.start.tail:  # the text may depend on them: a blank, an incomplete character
                    self._stream.push(token)
            else:
                self.state = end.value
                self._tell(self._finished)
                self.deliver()
            return None

    @property
    def has_ended(self) -> bool:
        """Whether no further token is to be generated."""
        return self._finished is not None

    def push(self, token: int, log_prob: float, top: tuple[tuple[int, float], ...]) -> None:
        """A token was drawn; `deliver` tells the client."""
        self._ids.append(token)
        text = self._end.push(self._stream.push(token))
        self._tell(Token(token, text, log_prob, top))
        if self._end.found is not None:
            self._finish("stop", "")
        elif len(self._ids) == self.sampling.max_tokens:
            self.end_of_length()

    def end_of_length(self) -> None:
        self._finish("length", self._end.push(self._stream.flush()) + self._end.flush())

    def end_cancelled(self) -> None:
        if self._finished is None:
            self._finish("cancelled", self._end.push(self._stream.flush()) + self._end.flush())
        else:  # it has been reading what was generated
            self._keep_state = False
            self._tell(self._finished)

    def fail(self, problem: Exception) -> None:
        self._keep_state = False
        self._finished = Finished("error", "", problem)
        self._tell(self._finished)
        self.deliver()

    @property
    def has_to_read(self) -> bool:
        """Whether the generated tokens are still to be read, for the state after them."""
        return self._finished is not None and self._keep_state

    def _finish(self, reason: Literal["length", "stop", "cancelled"], text: str) -> None:
        self._finished = Finished(reason, text)
        self._keep_state = self._keep_state and self.start is not None
        if self._keep_state and self.start is not None:
            # Token by token, as they were generated, unless the model is block invariant.
            length = None if self._lm.model.block_invariant else 1
            self._reading = read_text(self._lm.model, self._ids, self.start, length)
        else:
            self._tell(self._finished)

    def _tell(self, event: Token | Finished) -> None:
        self._events.append(event)

    def deliver(self) -> None:
        """Call the client with all events so far."""
        events, self._events = self._events, []
        for event in events:
            try:
                self._on_event(event)
            except Exception:
                log.exception("a client's function failed; its job is cancelled")
                self.is_cancelled = True
