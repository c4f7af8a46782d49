"""From a corpus to token files: written once, found again by their fingerprint."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from longspan.config import DataConfig, TokenizerConfig
from longspan.data import corpora, json_lines
from longspan.data.checksums import forget
from longspan.data.corpus import SPLITS, Corpus
from longspan.data.download import Progress
from longspan.data.encoding import encoder
from longspan.data.fingerprint import VERSION, content, contents, digest, fingerprint
from longspan.data.token_file import Encoder, TokenFile, write_token_file
from longspan.data.tokenizers import Tokenizer, check_settings, fit_tokenizer, load_tokenizer
from longspan.data.workers import use_processes
from longspan.errors import UserError
from longspan.files import alone, locked, remove_folder, whole_folder
from longspan.home import home
from longspan.progress import Task, told

_FACTS = "corpus.json"
NUMBERED = ("number", "fairseq")  # the tokenizers that read numbers


def _quiet(line: str) -> None:
    pass


@dataclass(frozen=True)
class TokenizedCorpus:
    """A corpus as token files, with the tokenizer that made them."""

    name: str
    fingerprint: str
    tokenizer: Tokenizer
    splits: dict[str, TokenFile]
    folder: Path


def prepare(
    config: DataConfig, progress: Progress = _quiet, tokenizer: Tokenizer | None = None
) -> TokenizedCorpus:
    """The token files of a corpus; they are made if they do not exist.

    With a `tokenizer`, which was made with the settings of `config`, no vocabulary is learned.
    """
    check_settings(config.tokenizer)
    try:
        with use_processes(config.processes):
            return _prepare(config, progress, tokenizer)
    except OSError as problem:  # an unreadable file, a full disk
        reason = problem.strerror or str(problem)
        place = f" ({problem.filename})" if problem.filename else ""
        raise UserError(f"could not prepare {config.corpus}: {reason}{place}") from None


def _prepare(config: DataConfig, progress: Progress, tokenizer: Tokenizer | None) -> TokenizedCorpus:
    corpus = corpora.find(config.corpus, progress, binary=config.binary, field=config.field)
    if config.field is not None and not json_lines.is_made_of(corpus):
        raise UserError(f"{config.corpus} has no .jsonl files: leave out data.field")
    if tokenizer is not None:
        return tokenize_with(tokenizer, corpus, config.tokenizer, progress)
    return tokenize(corpus, config.tokenizer, progress)


def forget_checks() -> None:
    """Token files, corpora and texts are read as a whole when they are next used."""
    forget()
    shutil.rmtree(contents(), ignore_errors=True)


def tokenize(corpus: Corpus, config: TokenizerConfig, progress: Progress = _quiet) -> TokenizedCorpus:
    """The same for a `Corpus`."""
    _check_form(corpus, config.kind)
    _check_not_empty(corpus)
    with _telling(progress, corpus, "reading the text"):
        identity = fingerprint(corpus, config)
    folder = _folder(corpus, identity)
    with _telling(progress, corpus, "checking the token files"):
        found = _open(folder)
    if found is None:
        with alone(folder, partial(_wait, corpus, progress)):
            found = _open(folder)  # another process may have made it in the meantime
            if found is None:
                if _remove_incomplete(folder, lambda: _open(folder)):
                    progress(f"{folder} is incomplete: preparing it again")
                _write(folder, corpus, config, identity, progress)
                found = _open(folder)
    if found is None:
        raise UserError(f"{folder} was removed while it was made: prepare {corpus.name} again")
    _warn_of_small_vocabulary(found, config)
    return found


def tokenize_with(
    tokenizer: Tokenizer, corpus: Corpus, config: TokenizerConfig, progress: Progress = _quiet
) -> TokenizedCorpus:
    """A corpus in the tokens of a tokenizer that exists already and was made with the settings `config`."""
    _check_not_empty(corpus)
    try:
        splits = {split: split_tokens(corpus, split, tokenizer, config, progress) for split in SPLITS}
    except UserError as problem:
        raise UserError(
            f"{corpus.name} cannot be read with the vocabulary of the initial weights: {problem}"
        ) from None
    folder = splits["train"].path.parent
    return TokenizedCorpus(corpus.name, fingerprint(corpus, config), tokenizer, splits, folder)


def _check_not_empty(corpus: Corpus) -> None:
    for split in SPLITS:
        if corpus.size(split) == 0:
            raise UserError(f"the {split} split of {corpus.name} is empty: all three splits need text")


def _warn_of_small_vocabulary(corpus: TokenizedCorpus, config: TokenizerConfig) -> None:
    size = corpus.tokenizer.vocabulary_size
    if config.vocabulary_size is not None and size < config.vocabulary_size:
        warnings.warn(
            f"the {config.kind} vocabulary of {corpus.name} has {size:,} tokens, not the "
            f"{config.vocabulary_size:,} that were asked for: the text has no more",
            stacklevel=3,
        )


def split_tokens(
    corpus: Corpus, split: str, tokenizer: Tokenizer, config: TokenizerConfig, progress: Progress = _quiet
) -> TokenFile:
    """One split in the tokens of a tokenizer that exists already: found if it was made before, else made now.

    `config` are the settings that the tokenizer was made with: where it is the one that `tokenize` made of
    this corpus, the token files of the training are used.
    """
    _check_form(corpus, tokenizer.kind)
    wanted = _files_of(tokenizer)
    prepared = _open(_folder(corpus, fingerprint(corpus, config)))
    if prepared is not None and _files_of(prepared.tokenizer) == wanted:
        return prepared.splits[split]
    identity = digest([VERSION, content(corpus)[split], corpus.form, wanted])
    folder = _folder(corpus, f"{split}-{identity}")
    open_split = partial(_open_split, folder, split, tokenizer.vocabulary_size)
    found = open_split()
    if found is None:
        with alone(folder, partial(_wait, corpus, progress)):
            found = open_split()
            if found is None:
                _remove_incomplete(folder, open_split)
                _write_split(folder, corpus, split, tokenizer, progress)
                found = open_split()
    if found is None:
        raise UserError(f"the {split} split of {corpus.name} has no tokens: it needs more than white space")
    return found


def _wait(corpus: Corpus, progress: Progress) -> None:
    progress(f"waiting for another process that prepares {corpus.name}")


def _check_form(corpus: Corpus, kind: str) -> None:
    if corpus.form == "numbers" and kind not in NUMBERED:
        raise UserError(
            f"{corpus.name} was prepared by fairseq and has numbers of words, which {kind} tokens "
            "cannot be: use the fairseq tokenizer (--data.tokenizer.kind fairseq)"
        )


def _remove_incomplete(folder: Path, opened: Callable[[], object | None]) -> bool:
    """Remove a folder that cannot be opened; false if there is none, or another process has completed it."""
    with locked(folder.parent):
        if not folder.exists() or opened() is not None:
            return False
        remove_folder(folder)
    return True


def _open_split(folder: Path, split: str, vocabulary_size: int) -> TokenFile | None:
    try:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        token_file = TokenFile(path=folder / f"{split}.tokens", **facts)
        if not token_file.is_complete():
            return None
    except (OSError, ValueError, TypeError):
        return None
    token_file.check(vocabulary_size)
    return token_file


def _files_of(tokenizer: Tokenizer) -> dict[str, str]:
    """What a tokenizer saves, as hashes: two that save the same make the same tokens."""
    with tempfile.TemporaryDirectory(prefix="longspan-") as folder:
        tokenizer.save(Path(folder))
        return _hashes(Path(folder))


def _hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _folder(corpus: Corpus, identity: str) -> Path:
    return home() / "tokens" / f"{corpus.name[:40]}-{identity}"


def _write(folder: Path, corpus: Corpus, config: TokenizerConfig, identity: str, progress: Progress) -> None:
    total = sum(corpus.size(split) for split in SPLITS)
    progress(f"preparing {corpus.name}: {total / 1e6:.1f} MB, {config.kind} tokens")
    with _telling(progress, corpus, f"learning the {config.kind} vocabulary"):
        tokenizer = fit_tokenizer(config, corpus)
    with (
        whole_folder(folder, first_wins=True) as unfinished,
        encoder(tokenizer, total) as encoding,
    ):
        tokenizer.save(unfinished / "tokenizer")
        token_files = {}
        for split in SPLITS:
            token_file = _encoded(unfinished, corpus, split, encoding, progress)
            if len(token_file) == 0:
                raise UserError(
                    f"the {split} split of {corpus.name} has no tokens: it needs more than white space"
                )
            token_files[split] = token_file
            progress(f"preparing {corpus.name}: {split} has {len(token_file):,} tokens")
        about = {
            "name": corpus.name,
            "fingerprint": identity,
            "settings": asdict(config),
            "splits": {split: token_file.facts() for split, token_file in token_files.items()},
        }
        about["checksum"] = digest([about, _hashes(unfinished / "tokenizer")])
        (unfinished / _FACTS).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        written = unfinished.stat().st_ino
    _remember(folder, written, token_files.values())


def _write_split(folder: Path, corpus: Corpus, split: str, tokenizer: Tokenizer, progress: Progress) -> None:
    progress(f"preparing {corpus.name}: {split}, {corpus.size(split) / 1e6:.1f} MB, {tokenizer.kind} tokens")
    size = corpus.size(split)
    with whole_folder(folder, first_wins=True) as unfinished, encoder(tokenizer, size) as encoding:
        token_file = _encoded(unfinished, corpus, split, encoding, progress)
        (unfinished / _FACTS).write_text(json.dumps(token_file.facts()) + "\n", encoding="utf-8")
        written = unfinished.stat().st_ino
    _remember(folder, written, [token_file])


def _encoded(folder: Path, corpus: Corpus, split: str, encoding: Encoder, progress: Progress) -> TokenFile:
    """Write the token file of a split."""
    with _telling(progress, corpus, f"encoding {split}", corpus.size(split)) as telling:

        def followed() -> Iterator[bytes]:
            for chunk in corpus.read(split):
                telling(telling.done + len(chunk))
                yield chunk

        return write_token_file(folder / f"{split}.tokens", encoding, followed())


def _telling(progress: Progress, corpus: Corpus, what: str, total: int = 0) -> AbstractContextManager[Task]:
    """Say every few seconds what is going on."""
    return told(progress, f"preparing {corpus.name}: {what}", "bytes" if total else "", total)


def _remember(folder: Path, written: int, token_files: Iterable[TokenFile]) -> None:
    """Token files that this process wrote need not be read to be checked, if its folder is the one kept."""
    with suppress(OSError):
        if folder.stat().st_ino == written:
            for token_file in token_files:
                replace(token_file, path=folder / token_file.path.name).remember()


def _open(folder: Path) -> TokenizedCorpus | None:
    """The corpus in `folder`, or None if it is incomplete; a `UserError` if a token file is damaged."""
    try:
        about = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        checksum = about.pop("checksum", None)  # folders of older versions have none
        if checksum not in (None, digest([about, _hashes(folder / "tokenizer")])):
            return None
        splits = {
            split: TokenFile(path=folder / f"{split}.tokens", **about["splits"][split]) for split in SPLITS
        }
        tokenizer = load_tokenizer(folder / "tokenizer")
        if not all(token_file.is_complete() for token_file in splits.values()):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        return None
    for token_file in splits.values():
        token_file.check(tokenizer.vocabulary_size)
    return TokenizedCorpus(about["name"], about["fingerprint"], tokenizer, splits, folder)
