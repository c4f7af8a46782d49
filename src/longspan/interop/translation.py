"""The translation of one kind of original checkpoint."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from torch import Tensor

from longspan.config import ModelConfig, schema
from longspan.errors import UserError

Options: TypeAlias = Mapping[str, Any]


class Tensors(dict[str, Tensor]):
    """The tensors of a checkpoint by the original's names; a missing one is a `UserError`."""

    def __missing__(self, name: str) -> Tensor:
        raise UserError(f"the tensor '{name}' is missing")

    def misfit(self, name: str) -> UserError:
        return UserError(f"the tensor '{name}' has a shape that does not fit: {list(self[name].shape)}")

    def size(self, *places: tuple[str, int]) -> int:
        """The size that most of these (name, dimension) have, so that an outlier can be named."""
        for name, dimension in places:
            if self[name].dim() <= dimension or not self[name].numel():
                raise self.misfit(name)
        return Counter(self[name].shape[dimension] for name, dimension in places).most_common(1)[0][0]


@dataclass(frozen=True)
class Entry:
    """Where one tensor goes: our parameters, and how it is split and transposed."""

    ours: tuple[str, ...]
    layout: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: (tensor,)


Table: TypeAlias = dict[str, Entry]


class Translation(ABC):
    """From one original's checkpoints to a model here.

    `groups` are the groups of the original's options that describe the model, and `types` the options in them
    that matter here. `unused` are tensors that the model does not use. `remedy` says what to do with a file
    that is refused. `companion` is the name of a file next to it with the options, if the original has one.
    """

    groups: tuple[str, ...]
    types: ClassVar[Mapping[str, Any]]
    unused: re.Pattern[str]
    remedy = "save a state_dict with the original's code and import that"
    companion: str | None = None

    def tensors(self, loaded: Mapping[str, Any]) -> Tensors:
        """All tensors, without the prefixes of wrappers."""
        return Tensors(only_tensors(loaded))

    def told(self, loaded: Mapping[str, Any]) -> Options:
        """The options that the file itself contains."""
        return {}

    def read(self, options: Options) -> Options:
        """The options that describe the model; a wrong type is an error."""
        return {
            name: schema.convert(hint, options[name], name)
            for name, hint in self.types.items()
            if name in options
        }

    @abstractmethod
    def config(self, tensors: Tensors, options: Options) -> ModelConfig:
        """From the options, else from the shapes, else the original's defaults."""

    @abstractmethod
    def vocabulary_size(self, tensors: Tensors, options: Options) -> int: ...

    @abstractmethod
    def table(self, config: Any, vocabulary_size: int) -> Table:
        """Every tensor of a checkpoint of this model, and where it goes."""

    @abstractmethod
    def second_names(self, config: Any) -> dict[str, str]:
        """Further names of shared tensors -> their name in `table`."""

    def parameters(self, tensors: Mapping[str, Tensor], config: Any, size: int) -> dict[str, Tensor]:
        """The tensors that are in the table, by our names: weights, gradients or optimizer state."""
        found: dict[str, Tensor] = {}
        for theirs, entry in self.table(config, size).items():
            if theirs in tensors:
                found |= zip(entry.ours, entry.layout(tensors[theirs]), strict=True)
        return found


def attributes(loaded: Mapping[str, Any], part: str = "model") -> Mapping[str, Any]:
    """The attributes of a module that was saved whole, by dotted names; none of a state dict."""
    return getattr(loaded.get(part), "attributes", {})


def only_tensors(loaded: Any, prefix: str = "") -> dict[str, Tensor]:
    """The named tensors, with `prefix` removed from their names."""
    parts = loaded.items() if isinstance(loaded, Mapping) else ()
    return {str(name).removeprefix(prefix): part for name, part in parts if isinstance(part, Tensor)}


def same(names: Mapping[str, str], *endings: str) -> Table:
    """Tensors that differ only in their names; with `endings`, several with the same beginning."""
    return {
        f"{theirs}{ending}": Entry((f"{ours}{ending}",))
        for theirs, ours in names.items()
        for ending in endings or ("",)
    }


def count(tensors: Mapping[str, Tensor], pattern: str) -> int:
    """One more than the largest number that `pattern`, with one group, matches in the names."""
    matches = (re.match(pattern, name) for name in tensors)
    number = 1 + max((int(match[1]) for match in matches if match), default=-1)
    if number > len(tensors):
        raise UserError(f"the names of the tensors count to {number}, but there are only {len(tensors)}")
    return number


def cluster_shapes(tensors: Tensors, tables: str) -> list[tuple[int, int]]:
    """(words, width) of each table whose name begins with `tables`; there is at least one."""
    clusters = max(1, count(tensors, rf"{re.escape(tables)}\.(\d+)\."))
    names = [f"{tables}.{i}.weight" for i in range(clusters)]
    return [(tensors.size((name, 0)), tensors.size((name, 1))) for name in names]


def division(widths: Sequence[int]) -> int:
    """The factor by which each cluster, or most of them, is narrower than the one before."""
    return max(
        range(1, widths[0] + 1),
        key=lambda factor: sum(width == widths[0] // factor**i for i, width in enumerate(widths)),
    )


def equal(tensors: Tensors, pairs: Mapping[str, str]) -> bool:
    """Whether tensors under second names equal those under the first; a missing one is shared."""
    return all(tensors[second].equal(tensors[first]) for second, first in pairs.items() if second in tensors)
