"""Rules of training: gradients, precision, and the hooks that the trainer calls."""

from __future__ import annotations

import torch

from longspan.state import State
from longspan.testing.probe import Broken, Probe, changed, copies
from longspan.testing.rule import Rule


def gradients(probe: Probe) -> None:
    """With and without a gradient through the carried state, for blocks shorter and longer than memories."""
    for block in (2, 5, 40):
        tokens = probe.tokens(2, block)
        for cut in (False, True):
            model = probe.copy().model.train()
            _, state = model(tokens, model.initial_state(2))
            if cut:
                _check_detached(state)
                state = state.detach()
            else:
                _, state = model(tokens, state)
            hidden, _ = model(tokens, state)
            model.head.nll(hidden, tokens).sum().backward()
            for name, weight in model.named_parameters():
                if weight.requires_grad and weight.grad is None:
                    raise Broken(f"'{name}' gets no gradient from blocks of {block} tokens")
                if weight.grad is not None and not torch.isfinite(weight.grad).all():
                    raise Broken(f"the gradient of '{name}' is not finite for blocks of {block} tokens")


def _check_detached(state: State) -> None:
    floats = [leaf for leaf in state.flatten().values() if leaf.is_floating_point() and leaf.numel()]
    if floats and not any(leaf.requires_grad for leaf in floats):
        raise Broken("the state after a block carries no gradient")
    if any(leaf.requires_grad for leaf in state.detach().flatten().values()):
        raise Broken("state.detach() still carries a gradient")


def autocast(probe: Probe) -> None:
    """What was read in bfloat16 is remembered in full precision."""
    model, first, then = probe.model, probe.tokens(2, 5), probe.tokens(2, 4)
    with torch.no_grad():
        with torch.autocast(probe.device.type, torch.bfloat16):
            _, rounded = model(first, model.initial_state(2))
        _, state = model(first, model.initial_state(2))
        found, expected = (model(then, carried)[0] for carried in (rounded, state))
    if found.dtype != expected.dtype:
        raise Broken(f"after a block under autocast hidden states are {found.dtype}")
    if not (found - expected).norm() < 0.1 * expected.norm():
        raise Broken("after a block under autocast hidden states are very different")


def hooks(probe: Probe) -> None:
    model = probe.model
    for name, value in model.penalties().items():
        if value.dim() != 0 or not torch.isfinite(value):
            raise Broken(f"the penalty '{name}' is not one finite number")
    for name, value in model.diagnostics().items():
        if not torch.isfinite(value).all():
            raise Broken(f"'{name}' of diagnostics is not finite")
    hash(model.shape_key(model.initial_state(1)))
    for number in (0, 1):
        model.begin_epoch(number)
    before = copies(model.initial_state(1))
    for done in (0.0, 0.5, 1.0):
        model.progress(done)
        if (moved := changed(model.initial_state(1), before)) is not None:
            raise Broken(f"progress changed '{moved}' of the initial state")
    model.after_update()
    name_of_state = changed(model.initial_state(1), before)
    if name_of_state is not None:
        raise Broken(f"after_update changed '{name_of_state}' of the initial state although no weight did")


RULES = (
    Rule(
        "gradients",
        "every weight gets a finite gradient, through a carried state too, and state.detach() cuts it",
        "detach() and no_grad inside forward, weights that are not used, 0/0 and log 0 in a backward pass",
        gradients,
    ),
    Rule(
        "autocast",
        "a state that was made under autocast can be read on in full precision",
        "casts with .to(dtype): keep the state in the type that the next block computes in",
        autocast,
    ),
    Rule(
        "hooks",
        "penalties, diagnostics, shape_key, begin_epoch, progress and after_update can be called at any time",
        "what these methods return, and what progress and after_update change",
        hooks,
    ),
)
