"""Held-out text in the model's own tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from longspan.data import TokenFile, Tokenizer, corpora
from longspan.data.corpus import SPLITS
from longspan.data.preparation import fingerprint
from longspan.data.token_file import write_token_file
from longspan.errors import UserError, nearest
from longspan.runs import RunFolder


@contextmanager
def held_out(
    corpus: str, split: str, tokenizer: Tokenizer, progress: Callable[[str], None]
) -> Iterator[TokenFile]:
    """The tokens of one split, inside a `with` block.

    The text is tokenized with the model's own tokenizer: the corpus may be another one or may have changed,
    and a vocabulary learned from it now would not be the model's.
    """
    if split not in SPLITS:
        raise UserError(f"there is no split '{split}'{nearest(split, SPLITS)} (one of {', '.join(SPLITS)})")
    text = corpora.find(corpus, progress)
    with tempfile.TemporaryDirectory(prefix="longspan-") as folder:
        yield write_token_file(Path(folder) / f"{split}.tokens", tokenizer, text.read(split))


def has_changed(run: RunFolder, progress: Callable[[str], None]) -> bool:
    """Whether the corpus of the run has changed since training, so that its splits may differ.

    The text is read only if the size or time of a file has changed.
    """
    data = run.config.data
    return fingerprint(corpora.find(data.corpus, progress), data.tokenizer) != run.fingerprint
