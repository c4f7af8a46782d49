"""What a server accepts, and the exceptions for what it refuses; each message is one line for the client."""

from __future__ import annotations

from dataclasses import dataclass

from longspan.errors import UserError


class Busy(UserError):
    """The queue is full: try again later."""


class Stopping(UserError):
    """The server stops and accepts nothing."""


class PromptTooLong(UserError):
    """A prompt, or a text to score, has too many tokens."""


class TooManyTokens(UserError):
    """More tokens are to be generated than allowed."""


class NoSuchSession(UserError):
    """There is no session of this id."""


class TooManySessions(UserError):
    """No further session can be created."""


class SessionTooLarge(UserError):
    """The state of one session alone exceeds the memory for sessions."""


class BadState(UserError):
    """The bytes are no state of this model, or they are damaged."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one server. All are checked before work begins."""

    prompt_tokens: int = 131_072
    generated_tokens: int = 16_384
    alternatives: int = 20  # log-probabilities of other tokens
    inspected_tokens: int = 2048
    waiting: int = 256  # jobs that have not begun
    slots: int | None = None  # texts that are generated at once; None: 32 on a CPU, 64 on a GPU
    sessions: int = 1024  # in memory and on disk
    session_bytes: int = 2**30  # of all states in memory
    upload_bytes: int = 2**30  # of a state that a client sends

    def check_prompt(self, tokens: int) -> None:
        if tokens > self.prompt_tokens:
            raise PromptTooLong(
                f"a text of {tokens:,} tokens is too long: at most {self.prompt_tokens:,} are read"
            )

    def check_inspected(self, tokens: int) -> None:
        if tokens > self.inspected_tokens:
            raise PromptTooLong(
                f"a text of {tokens:,} tokens is too long to inspect: at most {self.inspected_tokens:,}"
            )

    def check_generated(self, tokens: int) -> None:
        if tokens > self.generated_tokens:
            raise TooManyTokens(
                f"{tokens:,} tokens are too many: at most {self.generated_tokens:,} are generated"
            )
