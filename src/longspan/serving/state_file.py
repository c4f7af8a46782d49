"""The state of a text as bytes: a safetensors file with a checksum and the fingerprint of its model.

Such bytes may come from anywhere. They are parsed as safetensors and JSON only, and everything in them is
compared with what the model expects before it is used.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save as to_safetensors
from torch import Tensor

from longspan.config import schema
from longspan.reading import TAIL, TextState
from longspan.serving.limits import BadState
from longspan.state import State

if TYPE_CHECKING:
    from longspan.language_model import LoadedModel

FORMAT = "longspan text state 1"
LARGEST_HEADER = 4 * 2**20  # bytes
LONGEST_TEXT = 2**53  # tokens
LATEST = 2.0**40  # seconds since 1970
TEXT_TAIL = 4000  # characters of the text that are kept


@dataclass(frozen=True)
class Facts:
    """What a file says besides the tensors."""

    fingerprint: str  # of the model
    tokens: int
    tail: tuple[int, ...]
    text_tail: str  # the last characters of the text
    created: float  # seconds since 1970

    @staticmethod
    def read(said: Any) -> Facts:
        """From JSON; a `BadState` if something is missing or of another type."""
        kinds = {"fingerprint": str, "tokens": int, "tail": list, "text_tail": str, "created": float}
        if not isinstance(said, dict) or {name: type(value) for name, value in said.items()} != kinds:
            raise _damaged()
        is_whole = all(type(token) is int for token in said["tail"]) and 1 <= len(said["tail"]) <= TAIL
        is_bounded = 1 <= said["tokens"] <= LONGEST_TEXT and len(said["text_tail"]) <= TEXT_TAIL
        if not is_whole or not is_bounded or not 0 <= said["created"] < LATEST:
            raise _damaged()
        return Facts(**{**said, "tail": tuple(said["tail"])})


def fingerprint(lm: LoadedModel) -> str:
    """Of a model's options and weights: states are exchanged only between models that have the same."""
    found = hashlib.sha256(
        json.dumps(schema.write(lm.config).get("model"), sort_keys=True, default=str).encode()
    )
    for name, tensor in sorted(lm.model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(_bytes_of(tensor.detach().cpu().contiguous()))
    return found.hexdigest()


def to_bytes(state: TextState, facts: Facts) -> bytes:
    """A file with the state."""
    tensors = {f"state.{name}": leaf for name, leaf in state.state.flatten().items()}
    tensors["hidden"] = state.hidden_D
    # Copies: safetensors does not allow two names for one storage.
    tensors = {name: leaf.detach().to("cpu", copy=True).contiguous() for name, leaf in tensors.items()}
    said = json.dumps(asdict(facts), sort_keys=True)
    metadata = {"format": FORMAT, "facts": said, "checksum": _checksum(tensors, said)}
    return to_safetensors(tensors, metadata)


def read_facts(header: bytes) -> Facts:
    """The facts at the beginning of a file, of which at least the header is given; nothing is verified."""
    return Facts.read(_facts_and_checksum(header)[1])


def header_size(first: bytes) -> int:
    """How many bytes of a file `read_facts` needs, from its first 8."""
    size = int.from_bytes(first[:8], "little")
    if len(first) < 8 or size > LARGEST_HEADER:
        raise _damaged()
    return 8 + size


def from_bytes(data: bytes, lm: LoadedModel, expected: str) -> tuple[TextState, Facts]:
    """The state in a file, verified; `expected` is the fingerprint of the model."""
    said, parsed, checksum = _facts_and_checksum(data)
    facts = Facts.read(parsed)
    if facts.fingerprint != expected:
        raise BadState("this state comes from another model: read its text with this one")
    try:
        tensors = parse(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError):
        raise _damaged() from None
    if checksum != _checksum(tensors, said):
        raise _damaged()
    return _checked(tensors, facts, lm), facts


def _facts_and_checksum(data: bytes) -> tuple[str, Any, str]:
    size = header_size(data)
    try:
        header = json.loads(data[8:size])
        metadata = header["__metadata__"]
        if metadata["format"] != FORMAT or not all(isinstance(one, str) for one in metadata.values()):
            raise _damaged()
        return metadata["facts"], json.loads(metadata["facts"]), metadata["checksum"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadState("this is no state that longspan saved") from None


def _checked(tensors: dict[str, Tensor], facts: Facts, lm: LoadedModel) -> TextState:
    """The state, if it is one that the model could have after a text of so many tokens."""
    model = lm.model
    begun = model.initial_state(1)
    expected = {f"state.{name}": leaf for name, leaf in begun.flatten().items()}
    hidden_D = tensors.pop("hidden", None)
    with torch.no_grad():
        token_11 = torch.zeros(1, 1, dtype=torch.long, device=lm.device)
        like_D = model(token_11, begun)[0][0, 0]
    if tensors.keys() != expected.keys() or hidden_D is None:
        raise _unfit()
    if hidden_D.shape != like_D.shape or hidden_D.dtype != like_D.dtype:
        raise _unfit()
    context = model.context  # of models that grow their memory within contexts
    most = max(facts.tokens, model.vocabulary_size) if context is None else context
    for name, leaf in tensors.items():
        like = expected[name]
        grown = (
            context is not None and leaf.dim() > 1 and like.dim() == leaf.dim() and leaf.shape[1] <= context
        )
        same = leaf.shape == like.shape or (grown and _without(leaf.shape) == _without(like.shape))
        if not same or leaf.dtype != like.dtype:
            raise _unfit()
        if (
            not leaf.is_floating_point()
            and leaf.numel()
            and not 0 <= int(leaf.min()) <= int(leaf.max()) <= most
        ):
            raise _unfit()
    if not all(bool(leaf.isfinite().all()) for leaf in (hidden_D, *tensors.values())):
        raise BadState("this state has numbers that are not finite")
    if not all(0 <= token < model.vocabulary_size for token in facts.tail):
        raise _unfit()
    flat = {name.removeprefix("state."): leaf.to(lm.device) for name, leaf in tensors.items()}
    # In the order of the model's own states.
    state = State.unflatten({name: flat[name] for name in begun.flatten()})
    return TextState(state, hidden_D.to(lm.device), facts.tail, facts.tokens)


def _without(shape: torch.Size) -> tuple[int, ...]:
    """All but the length of a memory."""
    return (shape[0], *shape[2:])


def _checksum(tensors: Mapping[str, Tensor], said: str) -> str:
    crc = zlib.crc32(said.encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(_bytes_of(tensor), crc)
    return f"{crc:08x}"


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _damaged() -> BadState:
    return BadState("this state is damaged or incomplete: its checksum is wrong")


def _unfit() -> BadState:
    return BadState("this state does not fit the model: its tensors or counters are others")
