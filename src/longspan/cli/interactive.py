"""`longspan generate --interactive`: take turns with a model, which remembers everything before."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from longspan.errors import UserError

if TYPE_CHECKING:
    from longspan.language_model import LoadedModel


def take_turns(lm: LoadedModel, prompt: str, seed: int | None, settings: dict[str, Any]) -> None:
    """Read a line, continue it, and again, until the input ends.

    A line is appended to the text without its line end, an empty one as a line end. The state after each
    continuation is kept: the text before is never read again. Turn n has the seed `seed + n`.
    """
    lm.warn_of_unknown(prompt)
    state = lm.read(prompt) if prompt else None
    shown = sys.stdin.isatty()
    turn = 0
    while True:
        if shown:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            break
        text = line.rstrip("\r\n") or "\n"
        try:
            lm.warn_of_unknown(text)
            state = lm.read(text, state)
        except UserError as problem:  # such as a character that the vocabulary lacks: ask again
            print(f"longspan: {problem}", file=sys.stderr)
            continue
        answer = lm.generate(state=state, seed=None if seed is None else seed + turn, **settings)
        print(answer, flush=True)
        state, turn = answer.state, turn + 1
    if shown:
        print()
