"""Checkpoints of Smerity/sha-rnn."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from longspan.config import ShaRnnConfig
from longspan.errors import UserError
from longspan.interop.translation import (
    Entry,
    Options,
    Table,
    Tensors,
    Translation,
    attributes,
    count,
    equal,
    only_tensors,
    same,
)

NORMS = ("lnstart", "lnff", "lnxff")
TIED = {"decoder.weight": "encoder.weight"}


class ShaRnn(Translation):
    """A state dict does not contain the memory length, the splits of the vocabulary and the dropout.

    The original saves the model and its criterion as whole modules. Their attributes contain all of these.
    """

    groups = ("model", "criterion")
    types: ClassVar[Mapping[str, Any]] = {
        "ntoken": int,
        "ninp": int,
        "nhid": int,
        "nlayers": int,
        "num_max_positions": int,
        "dropouth": float,
        "dropouti": float,
        "wdrop": float,
        "tie_weights": bool,
        "splits": tuple[int, ...],
    }
    # Every block has all norms; lnmid and lnmem are used only with attention.
    unused = re.compile(r"blocks\.\d+\.(lnout|lnmid|lnmem)\..*|blocks\.\d+\.attn\.(qkvs|r_gate)")

    def tensors(self, loaded: Mapping[str, Any]) -> Tensors:
        criterion = only_tensors(loaded.get("criterion", {}))
        found = only_tensors(loaded.get("model", loaded))
        return Tensors(found | {f"criterion.{name}": tensor for name, tensor in criterion.items()})

    def told(self, loaded: Mapping[str, Any]) -> Options:
        model, criterion = attributes(loaded), attributes(loaded, "criterion")
        told = {name: model.get(name) for name in ("num_max_positions", "dropouth", "dropouti")}
        splits = criterion.get("splits")
        if isinstance(splits, list | tuple) and splits[:1] in ([0], (0,)):  # with both ends of the vocabulary
            told["splits"] = list(splits[1:-1])
        return told

    def vocabulary_size(self, tensors: Tensors, options: Options) -> int:
        return options.get("ntoken", tensors.size(("encoder.weight", 0), ("decoder.bias", 0)))

    def config(self, tensors: Tensors, options: Options) -> ShaRnnConfig:
        num_layers = count(tensors, r"blocks\.(\d+)\.")
        splits = tuple(options.get("splits", ()))
        if "criterion.tail_bias" in tensors and not splits:
            raise UserError(
                f"the vocabulary has {tensors.size(('criterion.tail_bias', 0))} splits, which the file does "
                "not contain: give the option 'splits' in the configuration"
            )
        return ShaRnnConfig(
            num_layers=options.get("nlayers", num_layers),
            width=options.get("ninp", tensors.size(*((f"blocks.0.{norm}.weight", 0) for norm in NORMS))),
            inner_width=options.get("nhid", tensors.size(("blocks.0.ff.linear1.weight", 0))),
            attention=_attention(tensors, num_layers),
            memory_length=options.get("num_max_positions", 5000),
            dropout=options.get("dropouth", 0.0),
            embedding_dropout=options.get("dropouti", 0.0),
            weight_drop=options.get("wdrop", 0.0),
            tied=options.get("tie_weights", equal(tensors, TIED)),
            splits=splits,
        )

    def table(self, config: ShaRnnConfig, vocabulary_size: int) -> Table:
        table = same({"encoder.weight": "embedding.weight", "decoder.bias": "head.bias_V"})
        if not config.tied:
            table |= same({"decoder.weight": "head.table.weight"})
        if config.splits:
            parts = {"tail_vectors": "part_vectors", "tail_bias": "part_bias"}
            table |= same({f"criterion.{theirs}": f"head.{ours}" for theirs, ours in parts.items()})
        block = 0
        for layer in range(config.num_layers):
            ours = _recurrent(f"blocks.{block}")
            if config.attends(layer):
                block += 1
                ours |= _single_head_attention(f"blocks.{block}")
            ours |= _boom(f"blocks.{block + 1}")
            table |= {f"blocks.{layer}.{name}": entry for name, entry in ours.items()}
            block += 2
        return table

    def second_names(self, config: ShaRnnConfig) -> dict[str, str]:
        return TIED if config.tied else {}


def _recurrent(block: str) -> Table:
    table = same({"lnstart": f"{block}.norm"}, ".weight", ".bias")
    lstm = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    return table | same({"rnn.": f"{block}.lstm."}, *lstm)


def _single_head_attention(block: str) -> Table:
    parts = {
        "lnmid": "norm",
        "lnmem": "memory_norm",
        "attn.q": "query",
        "attn.qln": "query_norm",
        "attn.vq.l1": "value_gate.mix",
    }
    table = same({theirs: f"{block}.{ours}" for theirs, ours in parts.items()}, ".weight", ".bias")
    scales = {"qs": "query_scale_D", "ks": "key_scale_D", "vs": "value_gate.scale_D"}
    for theirs, ours in scales.items():
        table[f"attn.{theirs}"] = Entry((f"{block}.{ours}",), lambda scale_11D: (scale_11D.flatten(),))
    return table


def _boom(block: str) -> Table:
    parts = {"lnff": "residual_norm", "lnxff": "norm", "ff.linear1": "expand"}
    return same({theirs: f"{block}.{ours}" for theirs, ours in parts.items()}, ".weight", ".bias")


def _attention(tensors: Tensors, num_layers: int) -> Literal["second-last", "every", "none"]:
    attending = {name.split(".")[1] for name in tensors if re.match(r"blocks\.\d+\.attn\.", name)}
    if not attending:
        return "none"
    return "every" if len(attending) == num_layers else "second-last"
