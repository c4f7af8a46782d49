"""Checkpoints of Transformer-XL: kimiyoung/transformer-xl in PyTorch, and Hugging Face's TransfoXL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal

import torch

from longspan.config import TransformerXLConfig
from longspan.config.transformer_xl import XLVocabularyConfig
from longspan.errors import UserError
from longspan.interop.translation import (
    Entry,
    Options,
    Table,
    Tensors,
    Translation,
    attributes,
    cluster_shapes,
    count,
    division,
    equal,
    only_tensors,
    same,
)

TABLES = "word_emb.emb_layers"
FAIRSEQ = (
    "decoder.model."  # prefix of Hugging Face's names in checkpoints of fairseq's examples/truncated_bptt
)
WORD_CUTOFFS = (20000, 40000, 200000)  # of both projects, for WikiText-103
# Options that shapes do not tell -> the attribute of the original's module.
ATTRIBUTES = {
    "mem_len": "mem_len",
    "clamp_len": "clamp_len",
    "same_length": "same_length",
    "dropout": "drop.p",
    "dropatt": "layers.0.dec_attn.dropatt.p",
    "pre_lnorm": "layers.0.dec_attn.pre_lnorm",
    "div_val": "crit.div_val",
}
INNER = (("0.weight", 0), ("0.bias", 0), ("3.weight", 1))  # the dimensions of the inner width


@dataclass(frozen=True)
class TransformerXL(Translation):
    """A state dict does not contain lengths, pre- or post-norm, dropout, and the cutoffs of a single table.

    The original saves the whole module. Its attributes contain all of these.
    """

    memory_length: int
    clamp_length: int
    same_length: bool
    start: Literal["empty", "zeros"]
    cluster_order: Literal["from-end", "forward"]
    companion: str | None = None
    prefix: str = ""  # of all names but those of the softmax

    groups = ("model",)
    types: ClassVar[Mapping[str, Any]] = {
        "n_token": int,
        "vocab_size": int,
        "d_model": int,
        "d_embed": int,
        "d_head": int,
        "d_inner": int,
        "n_layer": int,
        "n_head": int,
        "dropout": float,
        "dropatt": float,
        "pre_lnorm": bool,
        "mem_len": int,
        "clamp_len": int,
        "same_length": bool,
        "untie_r": bool,
        "cutoffs": tuple[int, ...],
        "div_val": int,
        "tie_weight": bool,
        "tie_projs": tuple[bool, ...],
        "layer_norm_epsilon": float,
    }
    unused = re.compile(r"pos_emb\.inv_freq")

    def tensors(self, loaded: Mapping[str, Any]) -> Tensors:
        found = only_tensors(loaded.get("model", loaded), FAIRSEQ)
        first = f"{self.prefix}{TABLES}.0.weight"
        if first not in found:  # except for the prefix the two kinds look the same, but compute differently
            raise UserError(f"the tensor '{first}' is missing")
        return Tensors(only_tensors(found, self.prefix))

    def told(self, loaded: Mapping[str, Any]) -> Options:
        model = attributes(loaded)
        if model.get("attn_type", 0) != 0:
            raise UserError(f"attention of type {str(model['attn_type'])[:20]} is not supported, only type 0")
        told = {theirs: model.get(name) for theirs, name in ATTRIBUTES.items()}
        cutoffs = model.get("crit.cutoffs")
        if isinstance(cutoffs, list | tuple) and cutoffs:  # the last one is the end of the vocabulary
            told["cutoffs"] = list(cutoffs[:-1])
        return told

    def vocabulary_size(self, tensors: Tensors, options: Options) -> int:
        words = sum(words for words, _ in cluster_shapes(tensors, TABLES))
        return options.get("n_token", options.get("vocab_size", words))

    def config(self, tensors: Tensors, options: Options) -> TransformerXLConfig:
        if options.get("layer_norm_epsilon", 1e-5) != 1e-5:
            raise UserError("layer_norm_epsilon must be 1e-5: other norms are not supported")
        attention, feed_forward = "layers.0.dec_attn", "layers.0.pos_ff"
        own_biases = f"{attention}.r_w_bias" in tensors and "r_w_bias" not in tensors
        per_layer = options.get("untie_r", own_biases)
        biases = [f"{attention}.{bias}" if per_layer else bias for bias in ("r_w_bias", "r_r_bias")]
        norms = [
            f"{part}.layer_norm.{kind}" for part in (attention, feed_forward) for kind in ("weight", "bias")
        ]
        width = options.get("d_model", tensors.size(*((name, 0) for name in norms)))
        inner = [(f"{feed_forward}.CoreNet.{part}", dim) for part, dim in INNER]
        clamp_length = options.get("clamp_len", self.clamp_length)
        return TransformerXLConfig(
            num_layers=options.get("n_layer", count(tensors, r"layers\.(\d+)\.")),
            width=width,
            num_heads=options.get("n_head", tensors.size(*((name, 0) for name in biases))),
            head_width=options.get("d_head", tensors.size(*((name, 1) for name in biases))),
            inner_width=options.get("d_inner", tensors.size(*inner)),
            dropout=options.get("dropout", 0.0),
            attention_dropout=options.get("dropatt", 0.0),
            norm="pre" if options.get("pre_lnorm", False) else "post",
            memory_length=options.get("mem_len", self.memory_length),
            same_length=options.get("same_length", self.same_length),
            clamp_length=clamp_length if clamp_length > 0 else None,
            start=self.start,
            biases="per-layer" if per_layer else "shared",
            vocabulary=self._vocabulary(tensors, options),
        )

    def _vocabulary(self, tensors: Tensors, options: Options) -> XLVocabularyConfig:
        shapes = cluster_shapes(tensors, TABLES)
        cutoffs = tuple(options["cutoffs"]) if "cutoffs" in options else _cutoffs(tensors, shapes)
        factor = options.get("div_val", division([width for _, width in shapes]))
        if "div_val" not in options and len(shapes) == 1 and _square(tensors):
            factor = 2  # or any other above 1: only then is there such a projection of a single cluster
        tables, projections = _tied_tables(cutoffs, factor), _tied_projections(cutoffs, factor)
        ties = options.get("tie_projs", [equal(tensors, dict([pair])) for pair in projections.items()])
        return XLVocabularyConfig(
            cutoffs=cutoffs,
            division=factor,
            table_width=options.get("d_embed", shapes[0][1]),
            tied=options.get("tie_weight", equal(tensors, tables)),
            tied_projections=_which([*ties, *[False] * len(cutoffs)][: len(cutoffs) + 1]),
            cluster_order=self.cluster_order,
        )

    def table(self, config: TransformerXLConfig, vocabulary_size: int) -> Table:
        table = _embedding(config) | _head(config, vocabulary_size)
        if config.biases == "shared":
            table |= same({"r_w_bias": "shared.biases.content_HK", "r_r_bias": "shared.biases.distance_HK"})
        for layer in range(config.num_layers):
            entries = _attention(config, f"blocks.{2 * layer}") | _feed_forward(f"blocks.{2 * layer + 1}")
            table |= {f"layers.{layer}.{name}": entry for name, entry in entries.items()}
        return table

    def second_names(self, config: TransformerXLConfig) -> dict[str, str]:
        cutoffs, factor = config.vocabulary.cutoffs, config.vocabulary.division
        projections = _tied_projections(cutoffs, factor) if _projected(config) else {}
        names = {
            second: first
            for number, (second, first) in enumerate(projections.items())
            if config.vocabulary.ties[number]
        }
        if config.vocabulary.tied:
            names |= _tied_tables(cutoffs, factor)
        if config.biases == "shared":  # Hugging Face lists them again in every layer
            for layer in range(config.num_layers):
                names |= {f"layers.{layer}.dec_attn.{bias}": bias for bias in ("r_w_bias", "r_r_bias")}
        return names


def _attention(config: TransformerXLConfig, block: str) -> Table:
    parts = {"r_net": "positions.project", "o_net": "out"}
    table = same({f"dec_attn.{theirs}": f"{block}.{ours}" for theirs, ours in parts.items()}, ".weight")
    table |= same({"dec_attn.layer_norm": f"{block}.norm"}, ".weight", ".bias")
    query_key_value = tuple(f"{block}.{part}.weight" for part in ("query", "key", "value"))
    table["dec_attn.qkv_net.weight"] = Entry(query_key_value, lambda rows: rows.chunk(3))
    if config.biases == "per-layer":
        biases = {"r_w_bias": "content_HK", "r_r_bias": "distance_HK"}
        names = {f"dec_attn.{theirs}": f"{block}.positions.biases.{ours}" for theirs, ours in biases.items()}
        table |= same(names)
    return table


def _feed_forward(block: str) -> Table:
    parts = {"CoreNet.0": "expand", "CoreNet.3": "contract", "layer_norm": "norm"}
    names = {f"pos_ff.{theirs}": f"{block}.{ours}" for theirs, ours in parts.items()}
    return same(names, ".weight", ".bias")


def _embedding(config: TransformerXLConfig) -> Table:
    tables = 1 if config.vocabulary.division == 1 else len(config.vocabulary.cutoffs) + 1
    names = {f"{TABLES}.{i}.weight": f"embedding.tables.{i}" for i in range(tables)}
    if _projected(config):
        names |= {f"word_emb.emb_projs.{i}": f"embedding.projections.{i}" for i in range(tables)}
    return same(names)


def _head(config: TransformerXLConfig, vocabulary_size: int) -> Table:
    vocabulary, clusters = config.vocabulary, len(config.vocabulary.cutoffs) + 1
    kinds = {"bias": "head.biases"} if vocabulary.tied else {"bias": "head.biases", "weight": "head.tables"}
    table: Table = {}
    for theirs, ours in kinds.items():
        if vocabulary.division > 1:
            table |= same({f"crit.out_layers.{i}.{theirs}": f"{ours}.{i}" for i in range(clusters)})
        else:  # one tensor for all words
            sizes = [end - start for start, end in pairwise((0, *vocabulary.cutoffs, vocabulary_size))]
            parts = tuple(f"{ours}.{i}" for i in range(clusters))
            table[f"crit.out_layers.0.{theirs}"] = Entry(
                parts, partial(torch.split, split_size_or_sections=sizes)
            )
    if vocabulary.cutoffs:
        table |= same({"crit.cluster_": "head.cluster_"}, "weight", "bias")
    own = [i for i in range(clusters) if _projected(config) and not vocabulary.ties[i]]
    return table | same({f"crit.out_projs.{i}": f"head.projections.{i}" for i in own})


def _projected(config: TransformerXLConfig) -> bool:
    return config.vocabulary.division > 1 or config.vocabulary.table_width not in (None, config.width)


def _square(tensors: Tensors) -> bool:
    """Whether the embedding is as wide as the model but still projected."""
    projection = "word_emb.emb_projs.0"
    return projection in tensors and len(set(tensors[projection].shape)) == 1


def _tied_tables(cutoffs: tuple[int, ...], factor: int) -> dict[str, str]:
    tables = 1 if factor == 1 else len(cutoffs) + 1
    return {f"crit.out_layers.{i}.weight": f"{TABLES}.{i}.weight" for i in range(tables)}


def _tied_projections(cutoffs: tuple[int, ...], factor: int) -> dict[str, str]:
    """One for each cluster; without division they all share one."""
    return {
        f"crit.out_projs.{i}": f"word_emb.emb_projs.{0 if factor == 1 else i}"
        for i in range(len(cutoffs) + 1)
    }


def _which(ties: list[bool]) -> Literal["none", "all-but-first", "all"] | tuple[bool, ...]:
    """As one word, if there is one."""
    if all(ties):
        return "all"
    if all(ties[1:]):
        return "all-but-first"
    return tuple(ties) if any(ties) else "none"


def _cutoffs(tensors: Tensors, shapes: list[tuple[int, int]]) -> tuple[int, ...]:
    sizes = [words for words, _ in shapes]
    if len(sizes) > 1:
        return tuple(accumulate(sizes))[:-1]
    if "crit.cluster_bias" not in tensors:
        return ()
    if tensors.size(("crit.cluster_bias", 0)) == len(WORD_CUTOFFS) and sizes[0] > WORD_CUTOFFS[-1]:
        return WORD_CUTOFFS
    raise UserError(
        "the softmax has clusters, but 'crit.cluster_bias' does not contain their cutoffs: give the option "
        "'cutoffs' in the configuration"
    )
