"""The fingerprint of a corpus: a hash of its text and of the settings that make tokens of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longspan.config import TokenizerConfig
from longspan.data.checksums import stamp
from longspan.data.corpus import Corpus
from longspan.data.tokenizers.fitting import every_nth
from longspan.files import whole_file
from longspan.home import home

# Part of every fingerprint: raise it when the same text and settings would give other tokens.
VERSION = 2


def fingerprint(corpus: Corpus, config: TokenizerConfig) -> str:
    """A hash of everything the tokens depend on: the text of each split and the settings."""
    return digest(
        {
            "version": VERSION,
            "text": content(corpus),
            "form": corpus.form,
            "tokenizer": _settings(corpus, config),
        }
    )


def _settings(corpus: Corpus, config: TokenizerConfig) -> dict[str, Any]:
    """As JSON. Settings of older versions, which had no `fit_bytes`, keep their fingerprints."""
    settings = asdict(config)
    if config.fit_bytes is None:
        del settings["fit_bytes"]
        if config.kind == "bpe" and every_nth(config, corpus) > 1:  # older versions took all of the text
            settings["every_nth"] = every_nth(config, corpus)
    return settings


def content(corpus: Corpus) -> dict[str, str]:
    """A hash of the bytes of each split; it is cached until a file changes."""
    paths = {piece.path for pieces in corpus.splits.values() for piece in pieces}
    stamps = {path: stamp(path) for path in paths}
    seen = [
        (split, str(piece.path), piece.start, piece.stop, *stamps[piece.path])
        for split in corpus.splits
        for piece in corpus.splits[split]
    ]
    known = contents() / f"{digest(seen)}.json"
    try:
        hashes = json.loads(known.read_text(encoding="utf-8"))
        if isinstance(hashes, dict) and set(hashes) == set(corpus.splits):
            return hashes
    except (OSError, ValueError):
        pass
    hashes = {}
    for split in corpus.splits:
        running = hashlib.blake2b(digest_size=16)
        for chunk in corpus.read(split):
            running.update(chunk)
        hashes[split] = running.hexdigest()
    with whole_file(known) as unfinished:
        unfinished.write_text(json.dumps(hashes) + "\n", encoding="utf-8")
    return hashes


def contents() -> Path:
    """The folder with the hashes that are known."""
    return home() / "content"


def digest(value: Any) -> str:
    """A short hash of a JSON value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
