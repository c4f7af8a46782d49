"""Held-out text in the model's own tokens."""

from __future__ import annotations

from collections.abc import Callable

from longspan.config import TokenizerConfig
from longspan.data import TokenFile, Tokenizer, corpora, local
from longspan.data.corpus import SPLITS, WHOLE
from longspan.data.fingerprint import fingerprint
from longspan.data.preparation import split_tokens
from longspan.errors import UserError, nearest
from longspan.runs import RunFolder


def held_out(
    corpus: str,
    split: str,
    tokenizer: Tokenizer,
    settings: TokenizerConfig,
    progress: Callable[[str], None],
    *,
    binary: bool = False,
    field: str | None = None,
) -> TokenFile:
    """The tokens of one split, made once by the tokenizer that the model was trained with.

    If it is the training corpus, its token files are used. The corpus may be another one or may have changed,
    so its vocabulary is not learned again: it would differ from the model's. `settings` are those of the
    tokenizer. The split `whole` is all of a text file. With `binary` files may hold any bytes.
    `field` has the text of JSON lines.
    """
    if split == WHOLE:
        file = corpora.file_of(corpus)
        if file is None:
            raise UserError(f"{corpus} is not a text file: score its train, valid or test split")
        text = local.whole_file(file, binary=binary, field=field)
        return split_tokens(text, WHOLE, tokenizer, settings, progress)
    check_split(split)
    found = corpora.find(corpus, progress, binary=binary, field=field)
    return split_tokens(found, split, tokenizer, settings, progress)


def check_split(split: str) -> None:
    """A `UserError` if there is no such split."""
    if split not in (*SPLITS, WHOLE):
        raise UserError(f"there is no split '{split}'{nearest(split, SPLITS)} (one of {', '.join(SPLITS)})")


def split_to_score(split: str | None, data: str | None) -> str:
    """The split that was asked for; if none was: `whole` if `data` is a file, else `test`."""
    if split is not None:
        return split
    return WHOLE if data is not None and corpora.file_of(data) is not None else "test"


def has_changed(run: RunFolder, progress: Callable[[str], None]) -> bool:
    """Whether the corpus of the run has changed since training, so that its splits may differ.

    The text is read only if the size or time of a file has changed.
    """
    data = run.config.data
    corpus = corpora.find(data.corpus, progress, binary=data.binary, field=data.field)
    return fingerprint(corpus, data.tokenizer) != run.fingerprint
