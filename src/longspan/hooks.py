"""Hooks: optional methods of modules, collected from all modules of a model.

Any `nn.Module` inside a `LanguageModel` may have any of these methods; no base class is needed:

    penalties() -> dict[str, Tensor]
        Scalars that are added to the training loss. Penalties with the same name are summed.
    after_update() -> None
        Called once after every optimizer step, for example to count updates or to clamp parameters.
    refresh() -> None
        Recompute what is derived from the weights. Called after `after_update`, and whenever weights were
        loaded or replaced by their average.
    begin_epoch(number: int) -> None
        Called before every step with the number of its epoch, counted from 0.
    progress(done: float) -> None
        Called before every step and evaluation with the fraction of the training that is done, of all stages
        together; 1 after the training, before its final score, unless the text ended first.
    diagnostics() -> dict[str, Tensor]
        Named tensors. Scalars (no dimensions) become metrics of every logged step; if several modules use the
        same name, their mean. Other tensors are for inspection from Python; if several modules use the same
        name, the module's path is put before it.
    records() -> dict[str, dict[str, Any]]
        At every logged step a run appends {"step": ..., **fields} to `<name>.jsonl`, as JSON. If several
        modules use the same name, the fields of each are under the module's path.
    optimizer_groups() -> dict[str, list[nn.Parameter]]
        Which parameters belong to which of `GROUPS`. Of undeclared parameters, weights of `nn.Linear` and of
        recurrent layers outside the output head are "matrix", tables of `nn.Embedding` are "embedding", those
        of the output head "head", single numbers "scalar", and all others are "no_decay".
    flops(shape: Shape) -> float
        FLOPs of the forward pass per token, of this module and everything inside it; see `longspan.flops`.

A penalty that depends on the tokens of a block is added in the forward pass: `add_penalty`.
Values that must survive a checkpoint belong in parameters and buffers.

If one operation can serve all instances of a class, the class may have a static method with `_of` added to
the name, which takes a list of them: `penalties_of(modules)`, `begin_epoch_of(modules, number)`. It is called
once instead of the methods of the instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from longspan.errors import UserError

GROUPS = {
    "matrix": "weight decay, trained by Muon: [rows, columns], or N matrices [N, rows, columns]",
    "decay": "weight decay, trained by AdamW in a stage with Muon",
    "no_decay": "no weight decay, trained by AdamW in a stage with Muon",
    "embedding": 'tables of tokens: like "no_decay", with embedding_learning_rate if a stage has one',
    "head": 'the output layer: like "no_decay", with head_learning_rate if a stage has one',
    "scalar": 'gates and learned scalars: like "no_decay", with scalar_learning_rate if a stage has one',
    "span": 'like "no_decay", with the learning rate span_learning_rate if a stage has one',
}
"""The optimizer groups of parameters."""


_added: ContextVar[list[Tensor] | None] = ContextVar("penalties of a forward pass", default=None)


def add_penalty(value: Tensor) -> None:
    """Called in a forward pass: add a scalar to the training loss, where a trainer collects penalties.

    It must be a mean over the tokens: for a batch in micro-batches the trainer averages it.
    """
    if (added := _added.get()) is not None:
        added.append(value)


@contextmanager
def added_penalties() -> Iterator[list[Tensor]]:
    """Inside, collects what `add_penalty` was given."""
    added: list[Tensor] = []
    token = _added.set(added)
    try:
        yield added
    finally:
        _added.reset(token)


def call_hook(model: nn.Module, hook: str, *arguments: Any) -> list[tuple[nn.Module, Any]]:
    """Call `hook` on all modules inside `model` that have it: their results in order, each with its module.

    For a class with `<hook>_of` there is one result, listed with the first of its modules.
    """
    modules = _inside(model)
    kinds = {type(module) for module in modules}  # there are fewer classes than modules
    all_of = {kind: getattr(kind, f"{hook}_of", None) for kind in kinds}
    having_it = {kind for kind in kinds if all_of[kind] or callable(getattr(kind, hook, None))}
    modules = [module for module in modules if type(module) in having_it]
    together: dict[Callable[..., Any], list[nn.Module]] = {}
    for module in modules:
        together.setdefault(all_of[type(module)] or getattr(module, hook), []).append(module)
    return [
        (same_class[0], call(same_class, *arguments) if all_of[type(same_class[0])] else call(*arguments))
        for call, same_class in together.items()
    ]


def has(module: nn.Module, hook: str) -> bool:
    """Whether the class of `module` has the method; an attribute of that name does not count."""
    return callable(getattr(type(module), hook, None))


def penalties(model: nn.Module) -> dict[str, Tensor]:
    """The penalties of all modules, summed by name."""
    found = _by_name(model, "penalties")
    for name, terms in found.items():
        for module, term in terms:
            if not isinstance(term, Tensor) or term.ndim > 0:
                raise UserError(f"the penalty {name!r} of {_kind(module)} must be a scalar tensor")
    return {name: reduce(torch.add, (term for _, term in terms)) for name, terms in found.items()}


def diagnostics(model: nn.Module) -> dict[str, Tensor]:
    """The diagnostics of all modules; scalars with the same name are averaged."""
    paths = {module: path for path, module in model.named_modules()}
    found: dict[str, Tensor] = {}
    for name, seen in _by_name(model, "diagnostics").items():
        values = {paths[module]: torch.as_tensor(value).detach() for module, value in seen}
        if len(values) == 1:
            (found[name],) = values.values()
        elif any(value.ndim for value in values.values()):
            found |= {f"{path}.{name}": value for path, value in values.items()}
        else:
            found[name] = torch.stack([value.double() for value in values.values()]).mean()
    return found


def records(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The fields for every `.jsonl` file, by its name."""
    paths = {module: path for path, module in model.named_modules()}
    return {
        name: given[0][1] if len(given) == 1 else {paths[module]: fields for module, fields in given}
        for name, given in _by_name(model, "records").items()
    }


def optimizer_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters that modules declare, by group."""
    found = _by_name(model, "optimizer_groups")
    return {group: [p for _, parameters in lists for p in parameters] for group, lists in found.items()}


def _inside(model: nn.Module) -> list[nn.Module]:
    """Every module inside, once. A model inside the model collects the hooks of its own modules."""
    modules = [module for module in model.modules() if module is not model]
    collecting = {kind for kind in set(map(type, modules)) if getattr(kind, "collects_hooks", False)}
    if not collecting:
        return modules
    models = [module for module in modules if type(module) in collecting]
    theirs = {id(part) for inner in models for part in inner.modules() if part is not inner}
    return [module for module in modules if id(module) not in theirs]


def _by_name(model: nn.Module, hook: str) -> dict[str, list[tuple[nn.Module, Any]]]:
    """The values that modules return for every name."""
    found: dict[str, list[tuple[nn.Module, Any]]] = {}
    for module, result in call_hook(model, hook):
        if not isinstance(result, Mapping):
            raise UserError(f"{hook}() of {_kind(module)} must return a dict, not {result!r}")
        for name, value in result.items():
            found.setdefault(name, []).append((module, value))
    return found


def _kind(module: nn.Module) -> str:
    return type(module).__name__
