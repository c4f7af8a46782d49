"""Modules that were pickled whole: their tensors by name, and the plain values of their attributes.

A module of torch keeps its tensors in `_parameters` and `_buffers` and its parts in `_modules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from longspan.errors import UserError
from longspan.interop.pickles import LONGEST_NAME, SCALARS, StandIn

WRAPPERS = ("module", "_orig_mod")  # of DataParallel, FP16_Module and torch.compile
# Far more than any model has. A module may contain itself, or parts that share all their parts.
MOST_ENTRIES, DEEPEST = 200_000, 64


class ModuleState(dict[str, Tensor]):
    """The state dict of a module, and the attributes of its parts under dotted names."""

    def __init__(self, module: StandIn) -> None:
        super().__init__()
        self.name = module.name
        self.attributes: dict[str, Any] = {}
        for prefix, part in _parts(module):
            transient = part.state.get("_non_persistent_buffers_set")
            for group in ("_parameters", "_buffers"):
                for name, tensor in _group(part, group).items():
                    saved = group == "_parameters" or not isinstance(transient, set) or name not in transient
                    if saved and isinstance(tensor, Tensor):
                        self[f"{prefix}{name}"] = tensor
            for name, value in part.state.items():
                if not name.startswith("_") and len(name) <= LONGEST_NAME and _is_plain(value):
                    self.attributes[f"{prefix}{name}"] = value


def named(value: Any) -> Mapping[str, Any] | None:
    """A checkpoint as a mapping: modules become state dicts, and the names of wrappers are removed.

    A list of modules is a model and its criterion. None if there is nothing with names.
    """
    if is_module(value):
        return {"model": ModuleState(value)}
    if isinstance(value, list | tuple):
        modules = [ModuleState(part) for part in value if is_module(part)]
        return dict(zip(("model", "criterion"), modules, strict=False)) if modules else None
    if not isinstance(value, Mapping):
        return None
    return _unwrapped({name: _opened(part) for name, part in value.items()})


def is_module(value: Any) -> bool:
    return isinstance(value, StandIn) and all(
        type(value.state.get(group)) is dict for group in ("_parameters", "_modules")
    )


def _opened(part: Any) -> Any:
    if is_module(part):
        return ModuleState(part)
    return _unwrapped(part) if type(part) is dict else part


def _unwrapped(tensors: dict[str, Any]) -> dict[str, Any]:
    """State dicts of wrapped modules have one prefix in all names."""
    for wrapper in WRAPPERS * 2:  # two wrappers around each other, in any order
        prefix = f"{wrapper}."
        if tensors and all(isinstance(name, str) and name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): part for name, part in tensors.items()}
    return tensors


def _parts(module: StandIn) -> Iterator[tuple[str, StandIn]]:
    """The module without its wrappers and everything in it, with the prefixes of their names."""
    waiting, entries = [("", _without_wrappers(module), 0)], 0
    while waiting:
        prefix, part, depth = waiting.pop()
        groups = [part.state, *(_group(part, name) for name in ("_parameters", "_buffers", "_modules"))]
        entries += sum(map(len, groups))
        if entries > MOST_ENTRIES or depth > DEEPEST or len(prefix) > LONGEST_NAME:
            raise UserError("it has a module that contains itself, or too many modules")
        yield prefix, part
        for name, inner in reversed(_group(part, "_modules").items()):
            if is_module(inner):
                waiting.append((f"{prefix}{name}.", inner, depth + 1))


def _without_wrappers(module: StandIn) -> StandIn:
    for _ in range(DEEPEST):
        inside = _group(module, "_modules")
        wrapped = [inside[name] for name in WRAPPERS if is_module(inside.get(name))]
        if len(inside) != 1 or not wrapped or _group(module, "_parameters"):
            break
        module = wrapped[0]
    return module


def _group(part: StandIn, group: str) -> dict[str, Any]:
    found = part.state.get(group)
    items = found.items() if type(found) is dict else ()
    return {name: value for name, value in items if type(name) is str and len(name) <= LONGEST_NAME}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 100 and all(type(part) in SCALARS for part in value)
    return type(value) in SCALARS
