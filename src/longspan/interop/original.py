"""From a checkpoint of an original implementation to a model."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from longspan.config import ModelConfig, schema
from longspan.errors import UserError, nearest
from longspan.interop.adaptive_span import AdaptiveSpan
from longspan.interop.fairseq_adaptive_span import FairseqAdaptiveSpan
from longspan.interop.gpt_spans import GptSpans
from longspan.interop.modules import named
from longspan.interop.sha_rnn import ShaRnn
from longspan.interop.torch_file import read_torch_file
from longspan.interop.transformer_xl import TransformerXL
from longspan.interop.translation import Options, Tensors, Translation
from longspan.models import LanguageModel, build
from longspan.models.skeleton import skeletons

KINDS: dict[str, Translation] = {
    "adaptive-span": AdaptiveSpan(),
    "fairseq-adaptive-span": FairseqAdaptiveSpan(),
    "gpt-spans": GptSpans(),
    "sha-rnn": ShaRnn(),
    "transformer-xl": TransformerXL(
        memory_length=0, clamp_length=-1, same_length=False, start="empty", cluster_order="from-end"
    ),
    "hf-transfo-xl": TransformerXL(
        memory_length=1600,
        clamp_length=1000,
        same_length=True,
        start="zeros",
        cluster_order="forward",
        companion="config.json",
        prefix="transformer.",
    ),
}
OVERRIDES = ("memory_length", "clamp_length", "same_length")


def load_original(
    path: str | Path,
    *,
    kind: str,
    config: Mapping[str, Any] | str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> LanguageModel:
    """The model of an original's checkpoint, ready to evaluate.

    Options that the file does not contain have the original's defaults, and dropout is 0. `config` gives
    others under the original's names, flat or in its groups: a mapping or a JSON file. For Hugging Face's
    models it is by default the config.json next to the file. `overrides` change lengths that no weight
    depends on: `memory_length`, `clamp_length`, `same_length`.
    """
    model_config, model = read_original(Path(path), kind, config)
    if not overrides:
        return model
    changed = build(_overridden(model_config, overrides, kind), model.vocabulary_size)
    changed.load_state_dict(model.state_dict())
    return changed.eval()


def check_kind(kind: str) -> None:
    """A `UserError` if no such checkpoint can be read."""
    if kind not in KINDS:
        raise UserError(f"unknown kind '{kind}'{nearest(kind, KINDS)} (known: {', '.join(KINDS)})")


def read_original(
    path: Path, kind: str, config: Mapping[str, Any] | str | Path | None = None
) -> tuple[ModelConfig, LanguageModel]:
    """The model of an original's checkpoint and the configuration that was found for it."""
    check_kind(kind)
    translation = KINDS[kind]
    if config is None and translation.companion:
        beside = path.with_name(translation.companion)
        config = beside if beside.is_file() else None
    given = _options(config, translation.groups)
    loaded = _load(path, translation.remedy)
    try:
        told = _without_none(translation.told(loaded))
        options = translation.read({**told, **given})
        tensors = translation.tensors(loaded)
        model_config = translation.config(tensors, options)
        size = translation.vocabulary_size(tensors, options)
        with skeletons():  # nothing is allocated before all shapes are known to fit
            skeleton = build(model_config, size)
        weights = _weights(skeleton, tensors, translation, model_config)
        model = build(model_config, size)
        model.load_state_dict(weights)
    except (UserError, ValueError) as problem:
        raise UserError(f"{path} does not fit the kind '{kind}' and its options: {problem}") from None
    if difference := translation.difference(model_config):
        warnings.warn(difference, stacklevel=3)
    return model_config, model.eval()


def _load(path: Path, remedy: str) -> Mapping[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a file is read, or refused with one line
            contents = read_torch_file(path)
            loaded = named(contents.value)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: give the checkpoint file in it") from None
    except OSError as problem:
        raise UserError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except UserError as problem:
        raise UserError(
            f"{path} is not a torch checkpoint, or is incomplete or damaged: {problem}; download it again"
        ) from None
    if contents.calls and not _has_tensors(loaded):
        raise UserError(
            f"{path} is refused: it has no named tensors, only what could run code from the file, such as "
            f"{min(contents.calls)[:80]!r}; {remedy}"
        )
    if loaded is None:
        raise UserError(f"{path} has no named tensors: save a state_dict and import that")
    return loaded


def _has_tensors(loaded: Any) -> bool:
    parts = loaded.values() if isinstance(loaded, Mapping) else ()
    return any(
        isinstance(inner, Tensor)
        for part in parts
        for inner in (part.values() if isinstance(part, Mapping) else (part,))
    )


def _options(config: Mapping[str, Any] | str | Path | None, groups: tuple[str, ...]) -> Options:
    """The options that describe the model, without their groups."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        source = config
        if Path(source).exists() and not Path(source).is_file():
            raise UserError(f"{source} cannot be read: it is not a regular file")
        try:
            config = json.loads(Path(config).read_bytes())
        except FileNotFoundError:
            raise UserError(f"there is no file {config}") from None
        except ValueError as problem:
            raise UserError(f"{config} is not JSON: {problem}") from None
        except RecursionError:
            raise UserError(f"{config} is not a configuration: it is nested too deeply") from None
        except OSError as problem:
            raise UserError(f"{config} cannot be read: {problem.strerror}") from None
        if not isinstance(config, Mapping):
            raise UserError(f"{source} must be a JSON object of the original's options")
    options = {name: value for name, value in config.items() if not isinstance(value, Mapping)}
    for group in groups:
        options.pop(group, None)
        inside = config.get(group, {})
        if not isinstance(inside, Mapping):
            raise UserError(f"'{group}' in a configuration must be a table of options, not {inside!r}")
        options |= inside
    return _without_none(options)


def _without_none(options: Options) -> Options:
    return {name: value for name, value in options.items() if value is not None}


def _weights(
    model: LanguageModel, tensors: Tensors, translation: Translation, config: ModelConfig
) -> dict[str, Tensor]:
    """The weights of `model` by our names; every tensor must be used, and every parameter must be set."""
    table = translation.table(config, model.vocabulary_size)
    second_names = translation.second_names(config)
    for name, tensor in tensors.items():
        if name in table or (name not in second_names and translation.unused.fullmatch(name)):
            continue
        if name not in second_names:
            raise UserError(f"unexpected tensor '{name}'")
        if not tensor.equal(tensors[second_names[name]]):
            raise UserError(f"the tensor '{name}' should be the same as '{second_names[name]}'")
    weights: dict[str, Tensor] = {}
    wanted = model.state_dict()
    for name, entry in table.items():
        tensor = tensors[name]
        try:
            parts = dict(zip(entry.ours, entry.layout(tensor), strict=True))
        except (RuntimeError, IndexError, ValueError):
            raise tensors.misfit(name) from None
        for ours, part in parts.items():
            if part.shape != wanted[ours].shape:
                raise UserError(
                    f"{tensors.misfit(name)} gives {list(part.shape)} where the model has "
                    f"{list(wanted[ours].shape)}"
                )
        if repeated := weights.keys() & parts.keys():
            raise UserError(f"the tensor '{name}' and another one both give '{min(repeated)}'")
        weights |= parts
    return weights


def _overridden(config: ModelConfig, overrides: Mapping[str, Any], kind: str) -> ModelConfig:
    fields = {field.name for field in dataclasses.fields(config)}
    known = [name for name in OVERRIDES if name in fields]
    for name in overrides:
        if name not in known:
            raise UserError(
                f"'{name}' cannot be overridden in a model of the kind '{kind}'{nearest(name, known)} "
                f"(possible: {', '.join(known) or 'none'})"
            )
    changes = dict(overrides)
    clamp_length = changes.get("clamp_length")
    if isinstance(clamp_length, int) and clamp_length <= 0:  # the original's value for no clamping
        changes["clamp_length"] = None
    return schema.read(type(config), {**schema.write(config), **changes}, "overrides")
