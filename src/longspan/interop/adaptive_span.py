"""Checkpoints of facebookresearch/adaptive-span: adaptive span, all-attention, adaptive input and softmax."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, ClassVar

from torch import Tensor

from longspan.config import (
    AdaptiveSpanConfig,
    AllAttentionConfig,
    ModelConfig,
    SpanConfig,
    VocabularyConfig,
)
from longspan.interop.translation import (
    Entry,
    Options,
    Table,
    Tensors,
    Translation,
    cluster_shapes,
    count,
    division,
    equal,
    only_tensors,
    same,
)

SPAN = "attn.attn.adaptive_span._mask.current_val"
PERSISTENT = "attn.attn.persistent_memory"
INNER = (("fc1.weight", 0), ("fc1.bias", 0), ("fc2.weight", 1))  # the dimensions of the inner width


class AdaptiveSpan(Translation):
    """The file does not contain the ramp, the penalty, the memory rule and the dropout."""

    groups: tuple[str, ...] = (
        "data_params",
        "model_params",
        "adapt_span_params",
        "adapt_io_params",
        "pers_mem_params",
    )
    types: ClassVar[Mapping[str, Any]] = {
        "vocab_size": int,
        "hidden_size": int,
        "inner_hidden_size": int,
        "nb_layers": int,
        "nb_heads": int,
        "attn_span": int,
        "dropout": float,
        "emb_dropout": float,
        "adapt_span_enabled": bool,
        "adapt_span_ramp": int,
        "adapt_span_loss": float,
        "adapt_span_cache": bool,
        "adapt_io_enabled": bool,
        "adapt_io_cutoffs": tuple[int, ...],
        "adapt_io_divval": int,
        "adapt_io_tied": bool,
        "pers_mem_size": int,
    }
    unused = re.compile(r".*\.mask_template")

    def tensors(self, loaded: Mapping[str, Any]) -> Tensors:
        return Tensors(only_tensors(loaded.get("model", loaded)))

    def vocabulary_size(self, tensors: Tensors, options: Options) -> int:
        if "vocab_size" in options:
            return options["vocab_size"]
        if _plain(tensors, options):
            return tensors.size(("in_emb.weight", 0), ("out_emb.weight", 0), ("out_emb.bias", 0))
        return sum(words for words, _ in cluster_shapes(tensors, "in_emb.emb_layers"))

    def config(self, tensors: Tensors, options: Options) -> ModelConfig:
        head_width, limit = tensors.size(("key_pe", 1)), tensors.size(("key_pe", 2))
        attention = [f"layers.0.attn.proj_{part}.weight" for part in ("query", "key", "val", "out")]
        width = options.get("hidden_size", tensors.size(*((name, 1) for name in attention)))
        if width % head_width:
            raise tensors.misfit("key_pe")
        num_persistent = options.get("pers_mem_size", _num_persistent(tensors))
        span = SpanConfig(
            kind="learned" if options.get("adapt_span_enabled", f"layers.0.{SPAN}" in tensors) else "fixed",
            limit=options.get("attn_span", limit),
            ramp=options.get("adapt_span_ramp", 32),
            penalty=options.get("adapt_span_loss", 0.0),
            memory="adaptive" if options.get("adapt_span_cache", False) else "full",
            softmax_over="layer",
        )
        common: dict[str, Any] = {
            "num_layers": options.get("nb_layers", count(tensors, r"layers\.(\d+)\.")),
            "width": width,
            "num_heads": options.get("nb_heads", width // head_width),
            "dropout": options.get("dropout", 0.0),
            "embedding_dropout": options.get("emb_dropout", 0.0),
            "span": span,
            "vocabulary": _vocabulary(tensors, options),
        }
        if num_persistent:
            return AllAttentionConfig(num_persistent=num_persistent, **common)
        inner = [(f"layers.0.ff.{part}", dim) for part, dim in INNER]
        return AdaptiveSpanConfig(
            inner_width=options.get("inner_hidden_size", tensors.size(*inner)), **common
        )

    def table(self, config: AdaptiveSpanConfig | AllAttentionConfig, vocabulary_size: int) -> Table:
        table: Table = {"key_pe": Entry(("shared.positions.keys_LK",), _nearest_first)}
        table |= _ends(config.vocabulary)
        for layer in range(config.num_layers):
            table |= {f"layers.{layer}.{name}": entry for name, entry in _layer(config, layer).items()}
        return table

    def second_names(self, config: AdaptiveSpanConfig | AllAttentionConfig) -> dict[str, str]:
        layers = [f"layers.{layer}" for layer in range(config.num_layers)]
        names = {
            f"{layer}.{PERSISTENT}.adaptive_span._mask.current_val": f"{layer}.{SPAN}" for layer in layers
        }
        return names | (_tied(len(config.vocabulary.cutoffs) + 1) if config.vocabulary.tied else {})


def _layer(config: AdaptiveSpanConfig | AllAttentionConfig, layer: int) -> Table:
    all_attention = isinstance(config, AllAttentionConfig)
    attention = f"blocks.{layer if all_attention else 2 * layer}"
    parts = {"query": "query", "key": "key", "val": "value", "out": "out"}
    table = same({f"attn.proj_{theirs}": f"{attention}.{ours}" for theirs, ours in parts.items()}, ".weight")
    table |= same({"norm1": f"{attention}.norm"}, ".weight", ".bias")
    if config.span.kind == "learned":
        table[SPAN] = Entry((f"{attention}.span.fraction_H",), lambda z_H11: (z_H11.flatten(),))
    if all_attention:
        table[f"{PERSISTENT}.key"] = Entry(
            (f"{attention}.persistent.keys_HPK",), lambda keys_HKP: (keys_HKP.mT,)
        )
        table[f"{PERSISTENT}.val"] = Entry((f"{attention}.persistent.values_HPK",))
        return table
    feed_forward = f"blocks.{2 * layer + 1}"
    parts = {"ff.fc1": "expand", "ff.fc2": "contract", "norm2": "norm"}
    names = {theirs: f"{feed_forward}.{ours}" for theirs, ours in parts.items()}
    return table | same(names, ".weight", ".bias")


def _ends(vocabulary: VocabularyConfig) -> Table:
    """The embedding and the head."""
    if not vocabulary.cutoffs:
        ends = same({"in_emb.weight": "embedding.weight"})
        return ends | same({"out_emb": "head.scores"}, ".weight", ".bias")
    names = {f"out_emb.cluster_proj.{part}": f"head.cluster_{part}" for part in ("weight", "bias")}
    for i in range(len(vocabulary.cutoffs) + 1):
        names |= {
            f"in_emb.emb_layers.{i}.weight": f"embedding.tables.{i}",
            f"in_emb.emb_projs.{i}": f"embedding.projections.{i}",
            f"out_emb.out_layers.{i}.bias": f"head.biases.{i}",
        }
        if not vocabulary.tied:
            names |= {
                f"out_emb.out_layers.{i}.weight": f"head.tables.{i}",
                f"out_emb.out_projs.{i}": f"head.projections.{i}",
            }
    return same(names)


def _plain(tensors: Tensors, options: Options) -> bool:
    return not options.get("adapt_io_enabled", count(tensors, r"in_emb\.emb_layers\.(\d+)") > 0)


def _vocabulary(tensors: Tensors, options: Options) -> VocabularyConfig:
    if _plain(tensors, options):
        return VocabularyConfig()
    shapes = cluster_shapes(tensors, "in_emb.emb_layers")
    cutoffs = tuple(accumulate(words for words, _ in shapes))[:-1]
    return VocabularyConfig(
        cutoffs=tuple(options.get("adapt_io_cutoffs", cutoffs)),
        division=options.get("adapt_io_divval", division([width for _, width in shapes])),
        tied=options.get("adapt_io_tied", equal(tensors, _tied(len(shapes)))),
    )


def _tied(clusters: int) -> dict[str, str]:
    tables = {f"out_emb.out_layers.{i}.weight": f"in_emb.emb_layers.{i}.weight" for i in range(clusters)}
    return tables | {f"out_emb.out_projs.{i}": f"in_emb.emb_projs.{i}" for i in range(clusters)}


def _num_persistent(tensors: Tensors) -> int:
    values = f"layers.0.{PERSISTENT}.val"
    if values not in tensors:
        return 0
    return tensors.size((values, 1), (f"layers.0.{PERSISTENT}.key", 2))


def _nearest_first(keys_1KL: Tensor) -> tuple[Tensor]:
    """The original stores the longest distance first."""
    return (keys_1KL.squeeze(0).mT.flip(-2),)
