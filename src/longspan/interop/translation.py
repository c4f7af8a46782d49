"""What there is to know about one kind of original checkpoint."""

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
    """The tensors of a checkpoint by the original's names; to ask for one that is not there is an error."""

    def __missing__(self, name: str) -> Tensor:
        raise UserError(f"the tensor '{name}' is missing")

    def misfit(self, name: str) -> UserError:
        return UserError(f"the tensor '{name}' has a shape that does not fit: {list(self[name].shape)}")

    def size(self, *places: tuple[str, int]) -> int:
        """The size that most of these (name, dimension) agree on, so that one which differs can be named."""
        for name, dimension in places:
            if self[name].dim() <= dimension or not self[name].numel():
                raise self.misfit(name)
        return Counter(self[name].shape[dimension] for name, dimension in places).most_common(1)[0][0]


@dataclass(frozen=True)
class Entry:
    """What becomes of one tensor: the parameters here that it holds, and how it is cut and turned."""

    ours: tuple[str, ...]
    layout: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: (tensor,)


Table: TypeAlias = dict[str, Entry]


class Translation(ABC):
    """From one original's checkpoints to a model here.

    `groups` are the parts of the original's own record of its options that describe the model, and `types`
    the options in them that matter here. `unused` are tensors that have no part in what the model computes.
    `remedy` is what to do with a file that is refused, `companion` the name of a file beside it that holds
    the options, where the original writes one.
    """

    groups: tuple[str, ...]
    types: ClassVar[Mapping[str, Any]]
    unused: re.Pattern[str]
    remedy = "save a state_dict with the original's code and import that"
    companion: str | None = None

    def tensors(self, loaded: Mapping[str, Any]) -> Tensors:
        """All tensors, without the prefixes that wrappers have put before their names."""
        return Tensors(only_tensors(loaded))

    def told(self, loaded: Mapping[str, Any]) -> Options:
        """The options that the file itself holds."""
        return {}

    def read(self, options: Options) -> Options:
        """Those of the options that say something about the model; one of a wrong type is an error."""
        return {
            name: schema.convert(hint, options[name], name)
            for name, hint in self.types.items()
            if name in options
        }

    @abstractmethod
    def config(self, tensors: Tensors, options: Options) -> ModelConfig:
        """Read from the shapes; else from the options, or the original's defaults of them."""

    @abstractmethod
    def vocabulary_size(self, tensors: Tensors, options: Options) -> int: ...

    @abstractmethod
    def table(self, config: Any, vocabulary_size: int) -> Table:
        """Every tensor that a checkpoint of this model has, and what becomes of it."""

    @abstractmethod
    def second_names(self, config: Any) -> dict[str, str]:
        """Further names of shared tensors -> the name that `table` has them under."""

    def parameters(self, tensors: Mapping[str, Tensor], config: Any, size: int) -> dict[str, Tensor]:
        """Those of `tensors` that the table knows, by our names: of weights, gradients or optimizers."""
        found: dict[str, Tensor] = {}
        for theirs, entry in self.table(config, size).items():
            if theirs in tensors:
                found |= zip(entry.ours, entry.layout(tensors[theirs]), strict=True)
        return found


def only_tensors(loaded: Any, prefix: str = "") -> dict[str, Tensor]:
    """What is a tensor with a name; `prefix` is taken from the names that begin with it."""
    parts = loaded.items() if isinstance(loaded, Mapping) else ()
    return {str(name).removeprefix(prefix): part for name, part in parts if isinstance(part, Tensor)}


def same(names: Mapping[str, str], *endings: str) -> Table:
    """Tensors that differ only in their names; with `endings`, several that begin alike."""
    return {
        f"{theirs}{ending}": Entry((f"{ours}{ending}",))
        for theirs, ours in names.items()
        for ending in endings or ("",)
    }


def count(tensors: Mapping[str, Tensor], pattern: str) -> int:
    """One more than the largest number that `pattern`, with one group, finds in the names."""
    matches = (re.match(pattern, name) for name in tensors)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def cluster_shapes(tensors: Tensors, tables: str) -> list[tuple[int, int]]:
    """(words, width) of each of the tables whose names begin with `tables`; there is at least one."""
    clusters = max(1, count(tensors, rf"{re.escape(tables)}\.(\d+)\."))
    names = [f"{tables}.{i}.weight" for i in range(clusters)]
    return [(tensors.size((name, 0)), tensors.size((name, 1))) for name in names]


def division(widths: Sequence[int]) -> int:
    """How many times narrower each cluster is than the one before, or most of them are."""
    return max(
        range(1, widths[0] + 1),
        key=lambda factor: sum(width == widths[0] // factor**i for i, width in enumerate(widths)),
    )


def equal(tensors: Tensors, pairs: Mapping[str, str]) -> bool:
    """Whether all second names hold what the first ones do; one that is not there is shared."""
    return all(tensors[second].equal(tensors[first]) for second, first in pairs.items() if second in tensors)
