"""What names in a recipe stand for: architectures, blocks, tokenizers and corpora.

What comes with the package (builtin.py) and what plugins add is registered by the same functions. A name that
is not known makes the registry import the installed plugins, those with an entry point in `longspan.plugins`.
Where an entry needs torch, `module:name` may stand for the object: it is imported when it is first used.
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
TOKENIZER_OPTIONS = ("vocabulary_size", "lowercase", "order")


@dataclass(frozen=True)
class Entry:
    """`made_by` builds, reads or loads what a name stands for; `config_class` holds its options."""

    made_by: Any
    config_class: type | None = None

    def resolve(self) -> Any:
        """The object itself, imported if it was given by name."""
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
    """Names and what is registered for them, in order of registration."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._entries: dict[str, E] = {}
        self._registered_by: dict[str, str] = {}

    def add(self, name: str, entry: E) -> None:
        """Register; the same again changes nothing, and another under a name that is taken is refused."""
        _load_builtin()
        before = self._entries.get(name)
        if before is None:
            self._entries[name] = entry
            caller = sys._getframe(2).f_globals.get(
                "__name__", "__main__"
            )  # of the function that calls this one
            self._registered_by[name] = _importing[-1] if _importing else caller
        elif before != entry and not _same_definition(before.made_by, entry.made_by):
            ours = self._registered_by[name] == BUILTIN
            taken = "comes with longspan" if ours else "is registered already, with another object"
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
        """What is registered by now; installed plugins are not imported for it."""
        _load_builtin()
        return self._entries

    def name_of(self, config_class: type) -> str | None:
        """The name that a class of options is registered for."""
        found = (name for name, entry in self.known().items() if entry.config_class is config_class)
        return next(found, None)

    def plugin_of(self, name: str) -> str | None:
        """The module to import so that a name is known; None for ours and for what no import can repeat."""
        by = self._registered_by[name] if name in self.known() else BUILTIN
        importable = getattr(sys.modules.get(by), "__spec__", None) is not None
        return by if importable and by not in (BUILTIN, "__main__") else None

    def forget_failed(self, before: Collection[str]) -> None:
        """After an import that failed, drop what it had registered; names `before` it stay."""
        for name in [name for name in self._entries if name not in before]:
            if getattr(self._entries[name].made_by, "__module__", None) not in sys.modules:
                del self._entries[name]


ARCHITECTURES: Table[Entry] = Table("architecture")
BLOCKS: Table[BlockEntry] = Table("block")
TOKENIZERS: Table[TokenizerEntry] = Table("tokenizer")
CORPORA: Table[CorpusEntry] = Table("corpus")


def register_architecture(name: str, config_class: type, build: Callable[[Any, int], Any] | str) -> None:
    """Let `architecture = name` in a recipe stand for a model of one's own.

    `config_class` is a frozen dataclass whose fields are made by `longspan.option` and `longspan.section`:
    the other keys of [model]. `build(config, vocabulary_size)` returns a `longspan.LanguageModel`. An
    architecture that can be searched has an option `pattern`, and its `build` takes an argument `arrange`.
    """
    _check_name("architecture", name)
    _check_made_by(f"the build of architecture '{name}'", build)
    _check_options(config_class, f"architecture '{name}'")
    other = ARCHITECTURES.name_of(config_class)
    if other is not None and other != name:
        raise UserError(
            f"{config_class.__name__} holds the options of the architecture '{other}': derive another class "
            f"from it for '{name}'"
        )
    ARCHITECTURES.add(name, Entry(build, config_class))


def register_block(
    letter: str, name: str, build: Callable[[Any, Any], Any] | str | None, config_class: type | None = None
) -> None:
    """Let a letter stand for a block of one's own, in patterns and among the candidates of a search.

    `build(config, options)` returns a new `longspan.Block` for a model with the configuration `config`, whose
    hidden states are `config.width` wide. `config_class`, if there is one, is a frozen dataclass of options
    which are read from [model.blocks.LETTER]; without it `options` is None. Only the letters that
    come with longspan have no `build`: every architecture makes such blocks in its own way.
    """
    if not (len(letter) == 1 and letter.isascii() and letter.isalpha()):
        raise UserError(f"a block is registered for one letter from a to z or A to Z, not {letter!r}")
    _check_made_by(f"the build of block '{letter}'", build, optional=True)
    if config_class is not None:
        _check_options(config_class, f"block '{letter}'")
    BLOCKS.add(letter, BlockEntry(build, config_class, name))


def register_tokenizer(
    kind: str, tokenizer: Any, *, config_class: type | None = None, options: Iterable[str] = ()
) -> None:
    """Let `kind` in [data.tokenizer] stand for a tokenizer of one's own.

    `tokenizer` is a subclass of `longspan.data.Tokenizer` with a static method `fit(config, corpus)`.
    `options` are those of `vocabulary_size`, `lowercase` and `order` that it takes. Further options are the
    fields of `config_class`, which derives from `longspan.config.TokenizerConfig`.
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
    """Let `corpus = name` in [data] stand for a text of one's own.

    `load(say)` returns the path of a file or folder of text, which is split as any other, or a
    `longspan.data.Corpus`. While it works it may call `say` with a line for the user. `about` is what
    'longspan data list' shows.
    """
    _check_name("corpus", name)
    if "." in name:
        raise UserError(f"the corpus '{name}' reads like a file: choose a name without a dot")
    _check_made_by(f"the load of corpus '{name}'", load)
    CORPORA.add(name, CorpusEntry(load, None, about))


def load_plugins(names: Iterable[str]) -> None:
    """Import the modules that a recipe, an option or a call names."""
    _load_builtin()
    for name in names:
        _import(name)


_builtin_loaded = _entry_points_loaded = False
_importing: list[str] = []  # plugins that are being imported, the innermost last


def _load_builtin() -> None:
    global _builtin_loaded
    if not _builtin_loaded:
        _builtin_loaded = True  # first: it registers through the same functions
        import_module(BUILTIN)


def _load_entry_points() -> None:
    """Import the installed plugins, once; one that is broken is a warning."""
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True
    for entry_point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            _import(entry_point.module)
        except UserError as problem:
            message = "longspan: warning: entry point '%s' of the installed plugins is left out: %s"
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
        raise UserError(f"the name of a {what} has letters, digits and - _ . +, not {name!r}")


def _check_made_by(what: str, made_by: Any, *, optional: bool = False) -> None:
    if not (callable(made_by) or isinstance(made_by, str) or (optional and made_by is None)):
        raise UserError(f"{what} must be a function, not {made_by!r}")


def _check_options(config_class: Any, whose: str) -> None:
    """A class that a table can be read into: a dataclass, every field documented."""
    if not isinstance(config_class, type) or not dataclasses.is_dataclass(config_class):
        raise UserError(f"the options of {whose} must be a dataclass, not {config_class!r}")
    try:
        typing.get_type_hints(config_class)
    except Exception as problem:  # whatever evaluating an annotation can raise
        raise UserError(f"the types of {config_class.__name__} cannot be read: {problem}") from None
    for field in dataclasses.fields(config_class):
        if "help" not in field.metadata:
            raise UserError(
                f"{config_class.__name__}.{field.name} has no help: declare the options of {whose} as "
                f"{field.name}: TYPE = longspan.option(DEFAULT, help=...)"
            )
