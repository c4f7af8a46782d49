"""Assigns every parameter to an optimizer group: what modules declare, and a rule for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from longspan import hooks
from longspan.config import StageConfig
from longspan.errors import UserError
from longspan.hooks import GROUPS
from longspan.models.interface import LanguageModel

_LISTED = 4  # names in a notice


def group_of_parameters(model: LanguageModel) -> dict[nn.Parameter, str]:
    """The group of every trainable parameter, one of `GROUPS`, in the order of `model.parameters()`.

    An undeclared parameter is "matrix" if it is a matrix of a linear or recurrent layer outside the output
    head, "embedding" if it is the table of an embedding, tied or not, "head" in the output head, "scalar" if
    it is a single number, and "no_decay" otherwise.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = {
        **dict.fromkeys(parameters, "no_decay"),
        **{p: "scalar" for p in parameters if p.numel() == 1},
        **dict.fromkeys(_embeddings(model), "embedding"),
        **dict.fromkeys(model.head.parameters(), "head"),
        **dict.fromkeys(_layer_matrices(model), "matrix"),
        **_declared(model),
    }
    return {p: groups[p] for p in parameters}


def undeclared_notice(model: LanguageModel, stages: Iterable[StageConfig]) -> str | None:
    """A line for the user if the rule for undeclared parameters may not be what they want.

    That is the case in stages with Muon or weight decay, if a module has undeclared matrices of its own that
    are not embeddings and not in the output head.
    """
    stages = list(stages)
    muon = any(stage.optimizer in ("muon", "normuon") for stage in stages)
    partly = [stage for stage in stages if stage.weight_decay_of == "matrices"]
    if not muon and not any(stage.weight_decay > 0 for stage in partly):
        return None
    known = {*_declared(model), *_layer_matrices(model), *model.head.parameters(), *_embeddings(model)}
    names = [
        name for name, p in model.named_parameters() if p.requires_grad and p.ndim >= 2 and p not in known
    ]
    if not names:
        return None
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    how = f"{' by AdamW' if muon else ''}{' without weight decay' if partly else ''}"
    shown = f"{', '.join(names[:_LISTED])}{more}"
    return f"these matrices are trained{how}: {shown}; declare them with optimizer_groups"


def _declared(model: LanguageModel) -> dict[nn.Parameter, str]:
    """The declared groups; a declaration of the model overrides those of its modules."""
    return _checked(model, hooks.optimizer_groups(model)) | _checked(model, model.optimizer_groups())


def _checked(model: LanguageModel, groups: Mapping[str, list[nn.Parameter]]) -> dict[nn.Parameter, str]:
    names = {p: name for name, p in model.named_parameters()}
    found: dict[nn.Parameter, str] = {}
    for group, parameters in groups.items():
        if group not in GROUPS:
            raise UserError(f"optimizer_groups() returns {group!r}: the groups are {', '.join(GROUPS)}")
        for p in parameters:
            if p not in names:
                raise UserError(
                    f"optimizer_groups() returns a tensor in {group!r} that is not a parameter of the model"
                )
            if found.setdefault(p, group) != group:
                raise UserError(f"optimizer_groups() returns {names[p]} twice, in {found[p]!r} and {group!r}")
            if group == "matrix" and p.ndim < 2:
                raise UserError(f"optimizer_groups() returns {names[p]} as a matrix: it needs 2 dimensions")
    return found


def _layer_matrices(model: LanguageModel) -> Iterator[nn.Parameter]:
    """Matrices of linear and recurrent layers: not of embeddings, head, norms or biases."""
    head = {*model.head.parameters()}
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.RNNBase):
            yield from (p for p in layer.parameters(recurse=False) if p.ndim == 2 and p not in head)


def _embeddings(model: LanguageModel) -> Iterator[nn.Parameter]:
    for layer in model.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            yield from layer.parameters(recurse=False)
