"""Rules of reading: what comes out depends on the text and the state, and on nothing else.

Shapes: B batch, T block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.generation import Decoder
from longspan.state import State
from longspan.testing.probe import Broken, Probe, changed, copies
from longspan.testing.rule import Rule

_CUTS = ([1] * 12, [5, 1, 6], [15, 9], [2, 13, 1, 1, 7])
_ROWS = ([2], [3, 1], [0, 0, 2], [1, 3, 2, 0, 1])


def shapes(probe: Probe) -> None:
    model, tokens = probe.model, probe.tokens(3, 5)
    with torch.no_grad():
        hidden, state = model(tokens, model.initial_state(3))
        log_probs, _ = model.log_probs(tokens, model.initial_state(3))
    if not isinstance(state, State):
        raise Broken(f"the state after a block is a {type(state).__name__}")
    if hidden.dim() != 3 or hidden.shape[:2] != (3, 5):
        raise Broken(f"hidden states have the shape {tuple(hidden.shape)} for 3 texts of 5 tokens")
    if log_probs.shape != (3, 5, model.vocabulary_size):
        raise Broken(f"log_probs have the shape {tuple(log_probs.shape)}")
    begun = model.initial_state(3).flatten()
    if begun.keys() != state.flatten().keys():
        after = sorted(state.flatten())
        raise Broken(f"initial_state has {sorted(begun)}, and after a block the state has {after}")
    for name, leaf in [*begun.items(), *state.flatten().items()]:
        if leaf.dim() == 0 or leaf.shape[0] != 3:
            raise Broken(f"'{name}' of the state has the shape {tuple(leaf.shape)} for 3 texts")


def probabilities(probe: Probe) -> None:
    model, tokens = probe.model, probe.tokens(3, 5)
    with torch.no_grad():
        hidden, _ = model(tokens, probe.warm_state(3))
        log_probs, _ = model.log_probs(tokens, probe.warm_state(3))
        nll = model.head.nll(hidden, tokens)
    sums = log_probs.double().exp().sum(-1)
    if not torch.allclose(sums, torch.ones_like(sums), rtol=1e-5, atol=1e-5):
        raise Broken(f"probabilities add up to {float(sums.flatten()[0]):.4g}")
    if nll.shape != tokens.shape or nll.dtype != torch.float32:
        raise Broken(f"head.nll gives {nll.dtype} of shape {tuple(nll.shape)} for 3 texts of 5 tokens")
    expected = -log_probs.gather(-1, tokens[..., None])[..., 0].float()
    if not torch.allclose(nll, expected, rtol=1.3e-6, atol=1e-5):
        most = float((nll - expected).abs().max())
        raise Broken(f"head.nll is not minus the log_probs of the targets (largest difference {most:.3g})")


def state_is_a_value(probe: Probe) -> None:
    for training in (False, True):
        state = probe.warm_state(2)
        before = copies(state)
        probe.model.train(training)
        probe.model(probe.tokens(2, 5), state)
        name = changed(state, before)
        if name is not None:
            raise Broken(f"reading a block changed '{name}' of the state that went in")


def nothing_hidden(probe: Probe) -> None:
    model, tokens, state = probe.model, probe.tokens(2, 5), probe.warm_state(2)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for with_gradients in (True, False):
        with torch.set_grad_enabled(with_gradients):
            first, after = model(tokens, state)
            model(probe.tokens(4, 9), model.initial_state(4))
            second, again = model(tokens, state)
        if not torch.equal(first, second) or changed(again, copies(after)) is not None:
            raise Broken("the same tokens and state gave something else after another text was read")
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer, buffers[name]):
            raise Broken(f"reading a block changed the buffer '{name}'")


def state_matters(probe: Probe) -> None:
    if not probe.has_state():
        return
    tokens = probe.tokens(2, 5)
    with torch.no_grad():
        fresh, _ = probe.model(tokens, probe.model.initial_state(2))
        warm, _ = probe.model(tokens, probe.warm_state(2))
    if torch.allclose(fresh, warm):
        raise Broken("the same tokens gave the same after two different texts")


def rows_commute(probe: Probe, choices: Sequence[list[int]] = _ROWS) -> None:
    model, tokens, state = probe.model, probe.tokens(4, 6), probe.warm_state(4)
    with torch.no_grad():
        hidden, after = model(tokens, state)
        for rows in choices:
            picked, picked_after = model(tokens[rows], state.select(rows))
            what = f"rows {rows} of a batch, read on their own, gave something else"
            probe.close(picked, hidden[rows], what, double=(1e-7, 1e-7))
            probe.close_states(picked_after, after.select(rows), what, double=(1e-9, 1e-11))


def rows_apart(probe: Probe) -> None:
    tokens, state = probe.tokens(3, 6), probe.warm_state(3)
    other = tokens.clone()
    other[[0, 2]] = probe.others(other[[0, 2]])
    with torch.no_grad():
        hidden, _ = probe.model(tokens, state)
        found, _ = probe.model(other, state.reset([0, 2]))
    what = "a text changed when the other texts of the batch did"
    probe.close(found[1], hidden[1], what, double=(1e-12, 1e-12))
    if torch.allclose(found[0], hidden[0]):
        raise Broken("other tokens gave the same hidden states")


def no_future(probe: Probe) -> None:
    tokens, state = probe.tokens(2, 8), probe.warm_state(2)
    other = tokens.clone()
    other[:, 5:] = probe.others(other[:, 5:])
    with torch.no_grad():
        hidden, _ = probe.model(tokens, state)
        found, _ = probe.model(other, state)
    what = "hidden states changed when tokens after them did"
    probe.close(found[:, :5], hidden[:, :5], what, double=(1e-12, 1e-12))
    if torch.allclose(found[:, 5:], hidden[:, 5:]):
        raise Broken("other tokens gave the same hidden states")


def zeros_begin(probe: Probe) -> None:
    model, tokens = probe.model, probe.tokens(3, 5)
    initial = model.initial_state(1)
    if any(leaf.any() for leaf in initial.flatten().values()):
        return  # an initial state that is learned: its rows are put where a text begins
    warm = probe.warm_state(3)
    with torch.no_grad():
        expected, _ = model(tokens[1:2], initial)
        for name, state in (("a state", warm), ("a decoding state", model.decoding_state(warm))):
            found, _ = model(tokens, state.reset([1]))
            what = f"a row of zeros in {name} is not the beginning of a text"
            probe.close(found[1:2], expected, what, double=(1e-9, 1e-11))


def blocks_alike(probe: Probe, cuts: Sequence[list[int]] = _CUTS) -> None:
    """Where the model declares it: however the text is cut, in both forms of the state."""
    if not probe.model.block_invariant:
        return
    for lengths in cuts:
        tokens = probe.tokens(2, sum(lengths))
        with torch.no_grad():
            whole, _ = probe.model(tokens, probe.model.initial_state(2))
            begun = probe.model.initial_state(2)
            for state in (begun, probe.model.decoding_state(begun)):
                pieces = []
                for piece in tokens.split(lengths, dim=1):
                    hidden, state = probe.model(piece, state)
                    pieces.append(hidden)
                what = f"a text of {sum(lengths)} tokens gave something else in blocks of {lengths}"
                probe.close(torch.cat(pieces, dim=1), whole, what, double=(1e-8, 1e-9))


def decoding_alike(probe: Probe) -> None:
    state = probe.warm_state(2)
    decoding = probe.model.decoding_state(state)
    with torch.no_grad():
        for number, token in enumerate(probe.tokens(2, 6).split(1, dim=1)):
            expected, state = probe.model(token, state)
            found, decoding = probe.model(token, decoding)
            what = f"decoding_state gave something else at token {number}"
            probe.close(found, expected, what, double=(1e-8, 1e-9))


def decoder_alike(probe: Probe) -> None:
    state = carried = probe.warm_state(2)
    before, decoder = copies(state), Decoder(probe.model, state)
    for number, tokens_B1 in enumerate(probe.tokens(2, 6).split(1, dim=1)):
        with torch.no_grad():
            expected_BTV, carried = probe.model.log_probs(tokens_B1, carried)
        found_BV: Tensor = decoder.read(tokens_B1)
        what = f"generation.Decoder gave something else at token {number}"
        probe.close(found_BV, expected_BTV[:, 0], what, double=(1e-8, 1e-9))
    if changed(state, before) is not None:
        raise Broken("generation.Decoder changed the state it began with")


def flat_form(probe: Probe) -> None:
    state, tokens = probe.warm_state(2), probe.tokens(2, 5)
    back = State.unflatten(state.flatten())
    if changed(back, copies(state)) is not None:
        raise Broken("State.unflatten(state.flatten()) is another state")
    if not torch.equal(probe.model(tokens, back)[0], probe.model(tokens, state)[0]):
        raise Broken("a state that was flattened and unflattened gave something else")


RULES = (
    Rule(
        "shapes",
        "tokens_BT and a state give hidden_BTD and a State whose tensors have the batch first",
        "initial_state, and what forward returns",
        shapes,
    ),
    Rule(
        "probabilities",
        "log_probs add up to 1, and head.nll is their negative at the targets, in float32 and not reduced",
        "the head: the softmax and its axis, softcaps, temperatures, the type of nll",
        probabilities,
    ),
    Rule(
        "state is a value",
        "forward must not change the state that it is given",
        "operations in place (copy_, +=, x[...] = y) on tensors of the state, and on views of them",
        state_is_a_value,
    ),
    Rule(
        "nothing hidden",
        "what forward gives depends on tokens, state and weights only",
        "attributes and buffers that forward sets, caches, and random numbers in evaluation mode",
        nothing_hidden,
    ),
    Rule(
        "state matters",
        "a model with a state must use it",
        "whether forward reads the state, and returns the one after the block",
        state_matters,
    ),
    Rule(
        "rows commute",
        "state.select(rows) and tokens[rows] must give the same rows of the result",
        "tensors of the state whose first dimension is not the batch, and their order",
        rows_commute,
    ),
    Rule(
        "rows apart",
        "no text may see another text of its batch",
        "norms and means over the batch, reshapes that mix rows, BatchNorm",
        rows_apart,
    ),
    Rule(
        "no future",
        "a hidden state may depend only on its own token and those before it",
        "masks, the padding of convolutions, norms and means over time",
        no_future,
    ),
    Rule(
        "zeros begin",
        "a row of zeros in a state is a text that has not begun",
        "initial_state, and what forward makes of zeros: norms with a bias, counters, first tokens",
        zeros_begin,
    ),
    Rule(
        "blocks alike",
        "with block_invariant a text gives the same in one block, in many, and token by token",
        "what is kept at the end of a block; or declare block_invariant = False",
        blocks_alike,
    ),
    Rule(
        "decoding alike",
        "decoding_state must be another form of the same state",
        "decoding_state, and how forward reads its form",
        decoding_alike,
    ),
    Rule(
        "decoder alike",
        "single tokens through generation.Decoder must give what forward gives",
        "decoding_state, and step_from of blocks",
        decoder_alike,
    ),
    Rule(
        "flat form",
        "the flat form of a state, names to tensors, must be all of it",
        "State subclasses, empty branches that forward needs, values that are no tensors",
        flat_form,
    ),
)
