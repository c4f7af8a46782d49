"""Small corpora for tests."""

from __future__ import annotations

from pathlib import Path

from longspan.data.corpus import SPLITS, Corpus, Form, Piece


def corpus_of(folder: Path, form: Form = "words", **texts: bytes) -> Corpus:
    """A corpus with the given bytes as its splits; a split that is not given has one short line."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = {}
    for split in SPLITS:
        path = folder / f"{split}.txt"
        path.write_bytes(texts.get(split, b"a b\n"))
        splits[split] = (Piece.whole(path),)
    return Corpus("small", splits, form)
