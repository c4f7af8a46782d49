"""Checkpoints of fairseq's examples/adaptive_span: the adaptive-span transformer without renormalisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longspan.config import AdaptiveSpanConfig
from longspan.errors import UserError
from longspan.interop.adaptive_span import SPAN, AdaptiveSpan
from longspan.interop.pickles import StandIn
from longspan.interop.translation import Options, Tensors, only_tensors

# Their names of options -> adaptive-span's.
OPTIONS = {
    "attn_span": "attn_span",
    "adapt_span_ramp": "adapt_span_ramp",
    "aux_loss_scaler": "adapt_span_loss",
    "d_inner": "inner_hidden_size",
    "d_model": "hidden_size",
    "dropout": "dropout",
    "emb_dropout": "emb_dropout",
    "n_head": "nb_heads",
    "n_layer": "nb_layers",
}
PREFIX = "decoder.model."
PLAIN = {"adapt_io_enabled": False, "pers_mem_size": 0}  # fairseq has neither


class FairseqAdaptiveSpan(AdaptiveSpan):
    """The tensors are those of adaptive-span. The file has the options too, in `cfg` or `args`."""

    groups = ("model",)
    types = {theirs: AdaptiveSpan.types[ours] for theirs, ours in OPTIONS.items()} | {
        "adapt_span_layer": bool
    }
    remedy = (
        "where fairseq is installed, load it and save its 'model' alone, and give the options of its "
        "cfg.model as the configuration"
    )

    def tensors(self, loaded: Mapping[str, Any]) -> Tensors:
        found = only_tensors(loaded.get("model", loaded))
        if not any(name.startswith(PREFIX) for name in found):  # otherwise the two kinds look the same
            raise UserError(f"no tensor's name begins with '{PREFIX}': try the kind 'adaptive-span'")
        return Tensors(only_tensors(found, PREFIX))

    def told(self, loaded: Mapping[str, Any]) -> Options:
        cfg = loaded.get("cfg")
        options = cfg.get("model") if isinstance(cfg, Mapping) else loaded.get("args")
        if isinstance(options, StandIn):  # an argparse.Namespace
            options = options.state
        return options if isinstance(options, Mapping) else {}

    def vocabulary_size(self, tensors: Tensors, options: Options) -> int:
        # fairseq counts its dictionary and leaves the option vocab_size at its default.
        return super().vocabulary_size(tensors, PLAIN)

    def config(self, tensors: Tensors, options: Options) -> AdaptiveSpanConfig:
        known = {ours: options[theirs] for theirs, ours in OPTIONS.items() if theirs in options}
        always = {"adapt_span_enabled": True, "adapt_span_cache": True, **PLAIN}
        found = super().config(tensors, {"adapt_span_loss": 2e-6, **known, **always})
        assert isinstance(found, AdaptiveSpanConfig)
        shared = options.get("adapt_span_layer", tensors[f"layers.0.{SPAN}"].dim() == 1)
        span = replace(found.span, per="layer" if shared else "head", renormalise=False)
        return replace(found, span=span)
