"""Checkpoints of GPTs with adaptive spans.

Their names are not standardised. Those of the usual implementations are understood, and each is brought into
one form, such as `layers.0.query.weight`. A tensor that is not understood is an error that names it.

Shapes: D width, K head width, T context.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from longspan.config import GptConfig, SpanConfig
from longspan.errors import UserError
from longspan.interop.translation import (
    Entry,
    Options,
    Table,
    Tensors,
    Translation,
    count,
    only_tensors,
    same,
)

LAYER = r"(?:h|blocks?|layers?)\.(\d+)\."
ATTENTION = LAYER + r"(?:\w*at+n\w*|attention|sa|mha|sa_heads?)\."
INNER = LAYER + r"(?:mlp|ffw?d?n?|ffwd|feed_?forward|fc)\.(?:(?:net|layers|main|model|seq)\.)?"
SUFFIX = r"\.(weight|bias)"
# The first pattern that matches a whole name gives its form here. `{}` are the groups.
NAMES = {
    r"(?:wte|tok\w*|embed\w*|emb|in_emb|char\w*)\.weight": "token",
    r"(?:wpe|pos\w*)(?:\.weight)?": "position",
    ATTENTION + r"(?:c_attn|\w*qkv\w*|in_proj)" + SUFFIX: "layers.{}.all.{}",
    ATTENTION + r"heads\.(\d+)\.(?:query|q|w_?q|q_proj)" + SUFFIX: "layers.{}.heads.{}.query.{}",
    ATTENTION + r"heads\.(\d+)\.(?:key|k|w_?k|k_proj)" + SUFFIX: "layers.{}.heads.{}.key.{}",
    ATTENTION + r"heads\.(\d+)\.(?:value|v|w_?v|v_proj)" + SUFFIX: "layers.{}.heads.{}.value.{}",
    ATTENTION + r"(?:query|queries|q|w_?q|to_q|q_proj|proj_query)" + SUFFIX: "layers.{}.query.{}",
    ATTENTION + r"(?:keys?|k|w_?k|to_k|k_proj|proj_key)" + SUFFIX: "layers.{}.key.{}",
    ATTENTION + r"(?:values?|v|w_?v|to_v|v_proj|proj_val(?:ue)?)" + SUFFIX: "layers.{}.value.{}",
    ATTENTION
    + r"(?:c_proj|proj|out|out_proj|o_proj|w_?o|to_out|proj_out|fc_out)"
    + SUFFIX: "layers.{}.out.{}",
    ATTENTION + r"(?:.*\.)?(?:current_val|z|spans?|\w*_span|span_\w+)": "layers.{}.span",
    INNER + r"(?:c_fc|0|fc_?1|w_?1|linear_?1|l1|expand)" + SUFFIX: "layers.{}.expand.{}",
    INNER + r"(?:c_proj|proj|[1-9]|fc_?2|w_?2|linear_?2|l2|contract)" + SUFFIX: "layers.{}.contract.{}",
    LAYER + r"(?:ln_?1|norm_?1|layer_?norm_?1|attn_norm|attention_norm)" + SUFFIX: "layers.{}.norm1.{}",
    LAYER + r"(?:ln_?2|norm_?2|layer_?norm_?2|ffn?_norm|mlp_norm)" + SUFFIX: "layers.{}.norm2.{}",
    r"(?:ln_?f|norm_?f|final_\w*norm|ln|norm|layer_?norm)" + SUFFIX: "final_norm.{}",
    r"(?:lm_head|head|out_emb|fc_out|output\w*|out|linear|unembed\w*|classifier|fc)" + SUFFIX: "head.{}",
}
# Causal masks and templates of masks: the model has its own.
MASKS = re.compile(r".*\b(?:tril|bias|mask|masked_bias|causal_mask|triu|mask_template|template)")
ROOT = re.compile(r"(?:transformer|model|gpt|decoder)\.")
PARTS = ("query", "key", "value")
HEADS = "num_heads"  # not a tensor of the file: as long as a layer has heads, where each has its own matrix


class GptSpans(Translation):
    """The file does not contain the ramp, which is as long as the context in the original, and the dropout.

    It contains the number of heads only if every head has its own span or matrix. The original's is 8.
    """

    groups = ("model",)
    types: ClassVar[Mapping[str, Any]] = {"n_head": int, "adapt_span_ramp": int, "dropout": float}
    unused = re.compile(HEADS)

    def tensors(self, loaded: Mapping[str, Any]) -> Tensors:
        found, unknown = Tensors(), []
        for name, tensor in only_tensors(_state(loaded)).items():
            ours = _form(ROOT.sub("", name, count=1))
            if ours is not None:
                found[ours] = tensor
            elif not MASKS.fullmatch(name):
                unknown.append(name)
        if unknown:
            more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
            raise UserError(f"these tensors are not understood: {', '.join(unknown[:8])}{more}")
        _join_heads(found)
        _check_biases(found)
        _add_what_is_implied(found)
        return found

    def vocabulary_size(self, tensors: Tensors, options: Options) -> int:
        return tensors.size(("token", 0), ("head.weight", 0))

    def config(self, tensors: Tensors, options: Options) -> GptConfig:
        if tensors["position"].dim() < 2:
            raise tensors.misfit("position")
        context, width = tensors["position"].shape[-2:]
        heads = len(tensors[HEADS]) if HEADS in tensors else 8
        spans = tensors["layers.0.span"].numel() if "layers.0.span" in tensors else 0
        span = SpanConfig(limit=context, ramp=options.get("adapt_span_ramp", context), memory="full")
        return GptConfig(
            num_layers=count(tensors, r"layers\.(\d+)\."),
            width=width,
            num_heads=options.get("n_head", spans if spans > 1 else heads),
            inner_width=tensors.size(("layers.0.expand.weight", 0)),
            context=context,
            dropout=options.get("dropout", 0.0),
            span=span if spans else None,
        )

    def table(self, config: GptConfig, vocabulary_size: int) -> Table:
        table = same({"token": "embedding.weight"})
        table["position"] = Entry(("blocks.0.table.weight",), lambda table_1TD: (table_1TD.flatten(0, -2),))
        table |= same({"final_norm": "final_norm", "head": "head.scores"}, ".weight", ".bias")
        for layer in range(config.num_layers):
            theirs, attention, inner = f"layers.{layer}", f"blocks.{2 * layer + 1}", f"blocks.{2 * layer + 2}"
            names = {f"{theirs}.{part}": f"{attention}.{part}" for part in (*PARTS, "out")}
            table |= same(names, ".weight")
            names = {f"{theirs}.{part}": f"{inner}.{part}" for part in ("expand", "contract")}
            names |= {f"{theirs}.norm1": f"{attention}.norm", f"{theirs}.norm2": f"{inner}.norm"}
            table |= same(names, ".weight", ".bias")
            if config.span is not None:
                table[f"{theirs}.span"] = Entry((f"{attention}.span.fraction_H",), _span_of(config.num_heads))
        return table

    def second_names(self, config: GptConfig) -> dict[str, str]:
        return {}


def _state(loaded: Mapping[str, Any]) -> Any:
    """The state dict, under one of the usual names or alone."""
    for name in ("model", "model_state_dict", "state_dict", "model_state"):
        if isinstance(loaded.get(name), Mapping):
            return loaded[name]
    return loaded


def _form(name: str) -> str | None:
    for pattern, ours in NAMES.items():
        match = re.fullmatch(pattern, name, re.IGNORECASE)
        if match:
            return ours.format(*match.groups())
    return None


def _join_heads(tensors: Tensors) -> None:
    """One matrix for each of query, key and value of a layer, from one of each head or one for all three."""
    for layer in range(count(tensors, r"layers\.(\d+)\.")):
        here = f"layers.{layer}"
        for kind in ("weight", "bias"):
            if f"{here}.all.{kind}" in tensors:
                rows = tensors.pop(f"{here}.all.{kind}").chunk(3)
                tensors |= {f"{here}.{part}.{kind}": row for part, row in zip(PARTS, rows, strict=False)}
            heads = count(tensors, rf"layers\.{layer}\.heads\.(\d+)\.query\.{kind}")
            for part in PARTS if heads else ():
                names = [f"{here}.heads.{head}.{part}.{kind}" for head in range(heads)]
                tensors[f"{here}.{part}.{kind}"] = torch.cat([tensors[name] for name in names])
                for name in names:
                    del tensors[name]
            if heads:
                tensors[HEADS] = torch.empty(heads)


def _check_biases(tensors: Tensors) -> None:
    """Attention has no biases here: those of the file must be zero."""
    for name in [name for name in tensors if re.fullmatch(r"layers\.\d+\.(query|key|value|out)\.bias", name)]:
        if tensors.pop(name).any():
            raise UserError(f"attention has no biases here, but '{name}' is not zero")


def _add_what_is_implied(tensors: Tensors) -> None:
    """A head without its own weights uses the embedding's; a layer without biases has biases of zero."""
    tensors.setdefault("head.weight", tensors["token"])
    for name in [name for name in tensors if re.fullmatch(r".*(norm\d?|head|expand|contract)\.weight", name)]:
        weight = tensors[name]
        tensors.setdefault(name.replace(".weight", ".bias"), weight.new_zeros(weight.shape[:1]))


def _span_of(num_heads: int) -> Any:
    def layout(z: Tensor) -> tuple[Tensor]:
        return (z.flatten().expand(num_heads) if z.numel() == 1 else z.flatten(),)

    return layout
