"""Checkpoints as the originals save them: whole modules, of classes that are not there when they are read."""

from __future__ import annotations

import re
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.interop.checkpoints import Original

# The path of a part in the model -> the class that the originals have there. The first that matches.
CLASSES = {
    "transformer-xl": {
        r"": "mem_transformer.MemTransformerLM",
        r"word_emb": "mem_transformer.AdaptiveEmbedding",
        r"pos_emb": "mem_transformer.PositionalEmbedding",
        r"crit": "utils.proj_adaptive_softmax.ProjectedAdaptiveLogSoftmax",
        r"layers\.\d+": "mem_transformer.RelPartialLearnableDecoderLayer",
        r"layers\.\d+\.dec_attn": "mem_transformer.RelPartialLearnableMultiHeadAttn",
        r"layers\.\d+\.pos_ff": "mem_transformer.PositionwiseFF",
    },
    "sha-rnn": {
        r"": "model.SHARNN",
        r"blocks\.\d+": "model.Block",
        r"blocks\.\d+\.attn": "model.Attention",
        r"blocks\.\d+\.attn\.vq": "model.Overparam",
        r"blocks\.\d+\.ff": "model.Boom",
        r".*\.(ln\w+|qln)": "apex.normalization.fused_layer_norm.FusedLayerNorm",
        r"criterion": "splitcross.SplitCrossEntropyLoss",
    },
}
OTHERS = {"LAMB": "pytorch_lamb.lamb.MinTrustLamb", "Parallel": "utils.data_parallel.BalancedDataParallel"}


@contextmanager
def fake_modules() -> Iterator[dict[str, Any]]:
    """The originals' classes, which can be imported inside only."""
    before = set(sys.modules)
    classes = {}
    for full in {name for kinds in CLASSES.values() for name in kinds.values()} | set(OTHERS.values()):
        module, _, name = full.rpartition(".")
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            place = ".".join(parts[:end])
            sys.modules.setdefault(place, types.ModuleType(place))
        kind = type(name, (torch.optim.SGD if "lamb" in full else nn.Module,), {"__module__": module})
        setattr(sys.modules[module], name, kind)
        classes[full] = kind
    try:
        yield classes
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]


def save_whole(made: Original, path: Path, *, legacy: bool = False, wrapped: bool = False) -> Path:
    """Save the model of an original, for SHA-RNN with its criterion and optimizer."""
    with fake_modules() as classes, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch finds no source of these classes
        shared: dict[int, nn.Parameter] = {}
        own = {name: tensor for name, tensor in made.tensors.items() if not name.startswith("criterion.")}
        model = _module(made.kind, "", own, classes, shared)
        _add_attributes(made, model)
        if wrapped:
            outer = classes[OTHERS["Parallel"]]()
            outer.module, outer.device_ids = model, [0, 1]
            model = outer
        contents: Any = model
        if made.kind == "sha-rnn":
            tail = {name[10:]: t for name, t in made.tensors.items() if name.startswith("criterion.")}
            criterion = _module(made.kind, "criterion", tail, classes, shared)
            criterion.splits = [0, *made.options["criterion"]["splits"], 100_000_000]
            optimizer = classes[OTHERS["LAMB"]](model.parameters(), lr=0.1, momentum=0.9)
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight)
            optimizer.step()
            contents = [model, criterion, optimizer]
        torch.save(contents, path, _use_new_zipfile_serialization=not legacy)
    return path


def _module(kind: str, path: str, tensors: dict[str, Any], classes: Any, shared: Any) -> nn.Module:
    full = next((name for place, name in CLASSES[kind].items() if re.fullmatch(place, path)), None)
    module = classes[full]() if full else nn.Module()
    for name, tensor in tensors.items():
        if "." not in name and name == "inv_freq":
            module.register_buffer(name, tensor)
        elif "." not in name:
            module.register_parameter(name, shared.setdefault(id(tensor), nn.Parameter(tensor)))
    for part in dict.fromkeys(name.split(".")[0] for name in tensors if "." in name):
        inside = {n.partition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{part}.")}
        place = f"{path}.{part}" if path else part
        module.add_module(part, _module(kind, place, inside, classes, shared))
    return module


def _add_attributes(made: Original, model: Any) -> None:
    options = made.options["model"]
    if made.kind == "sha-rnn":
        for name in ("ninp", "nhid", "nlayers", "num_max_positions", "dropouth", "dropouti", "dropout"):
            setattr(model, name, options[name])
        model.pos_emb, model.rnn_type, model.hdrop = [0] * 5000, "LSTM", nn.Dropout(0.0)
        return
    for name in (
        "n_token",
        "d_model",
        "n_head",
        "d_head",
        "mem_len",
        "clamp_len",
        "same_length",
        "attn_type",
    ):
        setattr(model, name, options[name])
    model.drop = nn.Dropout(options["dropout"])
    model.crit.cutoffs, model.crit.div_val = [*options["cutoffs"], options["n_token"]], options["div_val"]
    for layer in model.layers.children():
        layer.dec_attn.pre_lnorm, layer.dec_attn.dropatt = options["pre_lnorm"], nn.Dropout(0.0)
