"""What a module may say to the trainer: optional methods, collected from all modules of a model.

Any `nn.Module` inside a `LanguageModel` may have any of these methods, and needs no base class for them:

    penalties() -> dict[str, Tensor]
        Scalars that are added to the training loss. Those of one name are added up.
    after_update() -> None
        Called once after every optimizer step: to count updates, to project parameters.
    refresh() -> None
        Derive from the weights what is derived from them. Called after `after_update`, and whenever weights
        were loaded or replaced by their average.
    begin_epoch(number: int) -> None
        Called before every step with the number of its epoch, counted from 0.
    diagnostics() -> dict[str, Tensor]
        What there is to see inside. Scalars (no dimensions) become metrics of every logged step; where
        several modules give one name, their mean. Other tensors are for inspection from Python; where several
        modules give one name, it follows the module's path.
    records() -> dict[str, dict[str, Any]]
        At every logged step a run appends {"step": ..., **fields} to `<name>.jsonl`, as JSON. Where several
        modules give one name, the fields of each stand under the module's path.
    optimizer_groups() -> dict[str, list[nn.Parameter]]
        Which parameters belong to one of `GROUPS`. For all that nobody declares: weights of `nn.Linear` and
        of recurrent layers outside the output head are "matrix", everything else is "no_decay".
    flops(shape: Shape) -> float
        FLOPs per token of the forward pass, of this module and everything inside it; see `longspan.flops`.

What must survive a checkpoint belongs into parameters and buffers.

Where one operation can serve all instances of a class, the class has a static method with `_of` added to the
name, which gets the list of them: `penalties_of(modules)`, `begin_epoch_of(modules, number)`. It is called
once in place of the methods of the instances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from longspan.errors import UserError

GROUPS = {
    "matrix": "decays, and Muon moves it: [rows, columns], or many of them [N, rows, columns]",
    "decay": "decays, and Muon leaves it to AdamW",
    "no_decay": "does not decay, and Muon leaves it to AdamW",
    "span": 'as "no_decay", with the learning rate span_learning_rate where a stage has one',
}
"""How parameters are trained."""


def ask(model: nn.Module, hook: str, *arguments: Any) -> list[tuple[nn.Module, Any]]:
    """The answers of all modules inside `model` that have `hook`, in order, each with its module.

    Modules that answer at once give one answer, in the place of the first of them.
    """
    modules = _inside(model)
    kinds = {type(module) for module in modules}  # few: classes are looked through, not every module
    all_of = {kind: getattr(kind, f"{hook}_of", None) for kind in kinds}
    asked = {kind for kind in kinds if all_of[kind] or callable(getattr(kind, hook, None))}
    modules = [module for module in modules if type(module) in asked]
    together: dict[Callable[..., Any], list[nn.Module]] = {}
    for module in modules:
        together.setdefault(all_of[type(module)] or getattr(module, hook), []).append(module)
    return [
        (alike[0], answer(alike, *arguments) if all_of[type(alike[0])] else answer(*arguments))
        for answer, alike in together.items()
    ]


def has(module: nn.Module, hook: str) -> bool:
    """Whether its class has the method; an attribute of that name is something else."""
    return callable(getattr(type(module), hook, None))


def penalties(model: nn.Module) -> dict[str, Tensor]:
    """The named terms of all modules."""
    found = _by_name(model, "penalties")
    for name, terms in found.items():
        for module, term in terms:
            if not isinstance(term, Tensor) or term.ndim > 0:
                raise UserError(f"the penalty {name!r} of {_kind(module)} must be a scalar tensor")
    return {name: reduce(torch.add, (term for _, term in terms)) for name, terms in found.items()}


def diagnostics(model: nn.Module) -> dict[str, Tensor]:
    """What there is to see in all modules."""
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
    """The fields of every file."""
    paths = {module: path for path, module in model.named_modules()}
    return {
        name: given[0][1] if len(given) == 1 else {paths[module]: fields for module, fields in given}
        for name, given in _by_name(model, "records").items()
    }


def optimizer_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """What all modules declare."""
    found = _by_name(model, "optimizer_groups")
    return {group: [p for _, parameters in lists for p in parameters] for group, lists in found.items()}


def _inside(model: nn.Module) -> list[nn.Module]:
    """Every module inside, once; a model inside a model answers for its own modules."""
    modules = [module for module in model.modules() if module is not model]
    collecting = {kind for kind in set(map(type, modules)) if getattr(kind, "collects_hooks", False)}
    if not collecting:
        return modules
    models = [module for module in modules if type(module) in collecting]
    theirs = {id(part) for inner in models for part in inner.modules() if part is not inner}
    return [module for module in modules if id(module) not in theirs]


def _by_name(model: nn.Module, hook: str) -> dict[str, list[tuple[nn.Module, Any]]]:
    """What the modules give under every name."""
    found: dict[str, list[tuple[nn.Module, Any]]] = {}
    for module, answer in ask(model, hook):
        if not isinstance(answer, Mapping):
            raise UserError(f"{hook}() of {_kind(module)} must return a dict, not {answer!r}")
        for name, value in answer.items():
            found.setdefault(name, []).append((module, value))
    return found


def _kind(module: nn.Module) -> str:
    return type(module).__name__
