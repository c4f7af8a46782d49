"""Architectures, blocks, tokenizers and corpora by the names used in recipes.

The package itself (builtin.py) and plugins register with the same functions. Looking up an unknown name
imports the installed plugins, which have an entry point in the group `longspan.plugins`. An object may be
given as `module:name` and is then imported on first use, so that torch is not imported early.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, Generic, TypeVar

from longspan.errors import UserError
from longspan.plugins import import_plugin

ENTRY_POINTS = "longspan.plugins"
BUILTIN = "longspan.builtin"
TOKENIZER_OPTIONS = ("vocabulary_size", "lowercase", "order", "fit_bytes")


@dataclass(frozen=True)
class Entry:
    """`made_by` builds or loads the object; `config_class` holds its options."""

    made_by: Any
    config_class: type | None = None

    def resolve(self) -> Any:
        """`made_by` itself, imported if it is given as `module:name`."""
        if not isinstance(self.made_by, str):
            return self.made_by
        module, _, name = self.made_by.partition(":")
        return getattr(import_module(module), name)


@dataclass(frozen=True)
class BlockEntry(Entry):
    name: str = ""


@dataclass(frozen=True)
class TokenizerEntry(Entry):
    options: frozenset[str] = frozenset()


@dataclass(frozen=True)
class CorpusEntry(Entry):
    about: str = ""


E = TypeVar("E", bound=Entry)


class Table(Mapping[str, E], Generic[E]):
    """Registered entries by name, in order of registration."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._entries: dict[str, E] = {}
        self._registered_by: dict[str, str] = {}

    def add(self, name: str, entry: E) -> None:
        """Register an entry. The same entry again changes nothing; another one with this name is an error."""
        _load_builtin()
        before = self._entries.get(name)
        if before is None:
            self._entries[name] = entry
            # Frame 2 is the module that calls the registering function.
            caller = sys._getframe(2).f_globals.get("__name__", "__main__")
            self._registered_by[name] = _importing[-1] if _importing else caller
        elif before != entry and not _same_definition(before.made_by, entry.made_by):
            ours = self._registered_by[name] == BUILTIN
            taken = "comes with longspan" if ours else "is already registered with another object"
            raise UserError(f"the {self.what} '{name}' {taken}: choose another name")

    def __getitem__(self, name: str) -> E:
        _load_builtin()
        if name not in self._entries:
            _load_entry_points()
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        _load_builtin()
        _load_entry_points()
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def known(self) -> Mapping[str, E]:
        """What is registered so far, without importing installed plugins."""
        _load_builtin()
        return self._entries

    def name_of(self, config_class: type) -> str | None:
        """The name that a configuration class is registered for."""
        found = (name for name, entry in self.known().items() if entry.config_class is config_class)
        return next(found, None)

    def plugin_of(self, name: str) -> str | None:
        """The module whose import registers a name; None if it is built in or cannot be imported again."""
        by = self._registered_by[name] if name in self.known() else BUILTIN
        importable = getattr(sys.modules.get(by), "__spec__", None) is not None
        return by if importable and by not in (BUILTIN, "__main__") else None

    def forget_failed(self, before: Collection[str]) -> None:
        """Remove what a module registered before its import failed; the names in `before` stay."""
        for name in [name for name in self._entries if name not in before]:
            if getattr(self._entries[name].made_by, "__module__", None) not in sys.modules:
                del self._entries[name]


ARCHITECTURES: Table[Entry] = Table("architecture")
BLOCKS: Table[BlockEntry] = Table("block")
TOKENIZERS: Table[TokenizerEntry] = Table("tokenizer")
CORPORA: Table[CorpusEntry] = Table("corpus")


def register_architecture(name: str, config_class: type, build: Callable[[Any, int], Any] | str) -> None:
    """Register a model under the name that recipes use in `architecture = name`.

    `config_class` is a frozen dataclass with the other keys of [model]; its fields are made by
    `longspan.option` and `longspan.section`. `build(config, vocabulary_size)` returns a
    `longspan.LanguageModel`. For `longspan search` an architecture needs an option `pattern`, and its `build`
    an argument `arrange`.
    """
    _check_name("architecture", name)
    _check_made_by(f"the build of architecture '{name}'", build)
    _check_options(config_class, f"architecture '{name}'")
    other = ARCHITECTURES.name_of(config_class)
    if other is not None and other != name:
        raise UserError(
            f"{config_class.__name__} is already the configuration class of the architecture '{other}': "
            f"derive another class from it for '{name}'"
        )
    ARCHITECTURES.add(name, Entry(build, config_class))


def register_block(
    letter: str, name: str, build: Callable[[Any, Any], Any] | str | None, config_class: type | None = None
) -> None:
    """Register a block under a letter, for patterns and for the candidates of a search.

    `build(config, options)` returns a new `longspan.Block` for a model with the configuration `config` and
    hidden states of width `config.width`. `config_class`, if given, is a frozen dataclass; its options are
    read from [model.blocks.LETTER]. Without it `options` is None. Only the built-in letters have no `build`:
    every architecture makes these blocks itself.
    """
    if not (len(letter) == 1 and letter.isascii() and letter.isalpha()):
        raise UserError(f"a block needs one letter from a to z or A to Z, not {letter!r}")
    _check_made_by(f"the build of block '{letter}'", build, optional=True)
    if config_class is not None:
        _check_options(config_class, f"block '{letter}'")
    BLOCKS.add(letter, BlockEntry(build, config_class, name))


def register_tokenizer(
    kind: str, tokenizer: Any, *, config_class: type | None = None, options: Iterable[str] = ()
) -> None:
    """Register a tokenizer under the name that recipes use as `kind` in [data.tokenizer].

    `tokenizer` is a subclass of `longspan.data.Tokenizer` with a static method `fit(config, corpus)`.
    `options` lists which of `vocabulary_size`, `lowercase`, `order` and `fit_bytes` it supports. Further
    options are the fields of `config_class`, which derives from `longspan.config.TokenizerConfig`.
    """
    _check_name("tokenizer", kind)
    given = frozenset(options)
    if not given <= set(TOKENIZER_OPTIONS):
        raise UserError(f"the options of a tokenizer are {', '.join(TOKENIZER_OPTIONS)}, not {sorted(given)}")
    if not isinstance(tokenizer, str) and not (
        hasattr(tokenizer, "fit") and hasattr(tokenizer, "from_settings")
    ):
        raise UserError(
            f"the tokenizer '{kind}' needs fit(config, corpus) and from_settings(settings, folder): derive "
            "it from longspan.data.Tokenizer"
        )
    if config_class is not None:
        _check_options(config_class, f"tokenizer '{kind}'")
        if "kind" not in {field.name for field in dataclasses.fields(config_class)}:
            raise UserError(f"{config_class.__name__} must derive from longspan.config.TokenizerConfig")
    TOKENIZERS.add(kind, TokenizerEntry(tokenizer, config_class, given))


def register_corpus(
    name: str, load: Callable[[Callable[[str], None]], Any] | str, *, about: str = ""
) -> None:
    """Register a corpus under the name that recipes use in [data] as `corpus = name`.

    `load(say)` returns the path of a text file or folder, which is split like any other, or a
    `longspan.data.Corpus`. It may call `say` with lines for the user. `about` is shown by
    'longspan data list'.
    """
    _check_name("corpus", name)
    if "." in name:
        raise UserError(f"the corpus '{name}' looks like a file name: choose a name without a dot")
    _check_made_by(f"the load of corpus '{name}'", load)
    CORPORA.add(name, CorpusEntry(load, None, about))


def load_plugins(names: Iterable[str]) -> None:
    """Import plugins by the names of their modules."""
    _load_builtin()
    for name in names:
        _import(name)


_builtin_loaded = _entry_points_loaded = False
_importing: list[str] = []  # plugins that are being imported, the innermost last


def _load_builtin() -> None:
    global _builtin_loaded
    if not _builtin_loaded:
        _builtin_loaded = True  # before the import, which calls functions of this module
        import_module(BUILTIN)


def _load_entry_points() -> None:
    """Import the installed plugins, once; a plugin that fails is skipped with a warning."""
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True
    for entry_point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            _import(entry_point.module)
        except UserError as problem:
            message = "longspan: warning: the installed plugin with entry point '%s' is skipped: %s"
            logging.getLogger("longspan").warning(message, entry_point.name, problem)


def _import(plugin: str) -> None:
    tables: tuple[Table[Any], ...] = (ARCHITECTURES, BLOCKS, TOKENIZERS, CORPORA)
    names = [set(table.known()) for table in tables]
    _importing.append(plugin)
    try:
        import_plugin(plugin)
    except UserError:
        for table, before in zip(tables, names, strict=True):
            table.forget_failed(before)
        raise
    finally:
        _importing.pop()


def _same_definition(before: Any, now: Any) -> bool:
    """Whether a script that runs as a program has been imported as a plugin too: its first objects stay."""
    if getattr(before, "__module__", None) != "__main__":
        return False
    files = [getattr(sys.modules.get(thing.__module__), "__file__", None) for thing in (before, now)]
    return files[0] is not None and files[0] == files[1] and before.__qualname__ == now.__qualname__


def _check_name(what: str, name: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", name):
        raise UserError(f"the {what} name {name!r} is not valid: use letters, digits and - _ . +")


def _check_made_by(what: str, made_by: Any, *, optional: bool = False) -> None:
    if not (callable(made_by) or isinstance(made_by, str) or (optional and made_by is None)):
        raise UserError(f"{what} must be a function, not {made_by!r}")


def _check_options(config_class: Any, whose: str) -> None:
    """Check that a configuration class is a dataclass with a help text for every field."""
    if not isinstance(config_class, type) or not dataclasses.is_dataclass(config_class):
        raise UserError(f"the options of {whose} must be a dataclass, not {config_class!r}")
    try:
        typing.get_type_hints(config_class)
    except Exception as problem:  # evaluating an annotation can raise anything
        raise UserError(f"the types of {config_class.__name__} cannot be read: {problem}") from None
    for field in dataclasses.fields(config_class):
        if "help" not in field.metadata:
            raise UserError(
                f"{config_class.__name__}.{field.name} has no help: declare the options of {whose} as "
                f"{field.name}: TYPE = longspan.option(DEFAULT, help=...)"
            )
