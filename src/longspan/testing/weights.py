"""Rules of weights: all of a model is in its state_dict, once."""

from __future__ import annotations

import copy

import torch

from longspan.testing.probe import Broken, Probe
from longspan.testing.rule import Rule


def stored_once(probe: Probe) -> None:
    stored = probe.model.state_dict()
    missing = dict(probe.model.named_parameters()).keys() - stored.keys()
    if missing:
        raise Broken(f"the state_dict lacks the parameters {sorted(missing)}")
    places: dict[int, str] = {}
    for name, weight in stored.items():
        place = weight.data_ptr()
        if weight.numel() and place in places:
            raise Broken(f"'{places[place]}' and '{name}' are the same weight")
        places[place] = name


def weights_are_all(probe: Probe) -> None:
    """Another model of the same kind becomes this one by loading its weights."""
    model, tokens = probe.model, probe.tokens(2, 9)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            if weight.is_floating_point():
                weight.add_(torch.rand_like(weight))
        twin.after_update()
        twin.load_state_dict(model.state_dict())
        expected, state = model(tokens, model.initial_state(2))
        found, twin_state = twin(tokens, twin.initial_state(2))
    what = "a model that was given the same weights gave something else"
    probe.close(found, expected, what, double=(1e-7, 1e-7))
    probe.close_states(twin_state, state, what, double=(1e-9, 1e-11))


def weights_from_outside(probe: Probe) -> None:
    model, tokens = probe.model, probe.tokens(2, 4)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with torch.no_grad():
        found, _ = torch.func.functional_call(model, weights, (tokens, model.initial_state(2)))
        expected, _ = model(tokens, model.initial_state(2))
    what = "torch.func.functional_call with the same weights gave something else"
    probe.close(found, expected, what, double=(1e-7, 1e-7))


RULES = (
    Rule(
        "stored once",
        "every weight is in the state_dict, under one name",
        "tied weights: keep the module that does not own a weight in a tuple, so that it is not registered",
        stored_once,
    ),
    Rule(
        "weights are all",
        "load_state_dict must make a model what another one is",
        "values that are derived from weights: register a load_state_dict post hook that derives them again",
        weights_are_all,
    ),
    Rule(
        "weights from outside",
        "forward must use the parameters, not copies of them",
        "copies of weights that are made in __init__ or kept between calls",
        weights_from_outside,
    ),
)
