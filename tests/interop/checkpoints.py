"""Checkpoints in the layouts of the originals, made of their recorded weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.models import golden, test_fairseq_golden, test_sha_rnn_golden, transformer_xl_golden

TEMPLATE = "layers.0.attn.attn.adaptive_span._mask.mask_template"
SHARED = {  # names of tied tensors -> their second names
    r"in_emb\.emb_layers\.(\d+\.weight)": r"out_emb.out_layers.\1",
    r"in_emb\.emb_projs\.(\d+)": r"out_emb.out_projs.\1",
    r"(.*\.attn\.attn)\.(adaptive_span\..*)": r"\1.persistent_memory.\2",
    r"encoder\.weight": "decoder.weight",
    r"(?:transformer\.)?word_emb\.emb_layers\.(\d+\.weight)": r"crit.out_layers.\1",
}


@dataclass
class Original:
    """A checkpoint of an original: its tensors, what else it holds, and its options."""

    kind: str
    tensors: dict[str, Tensor]
    options: dict[str, Any]

    @staticmethod
    def of(case: str) -> Original:
        if case.startswith(("txl", "hf")):
            xl = transformer_xl_golden.Golden.load(case)
            kind = "hf-transfo-xl" if xl.hugging_face else "transformer-xl"
            made = Original(kind, _weights(xl.tensors), {"model": xl.facts["model"]})
            _add_xl_extras(made, xl.facts["model"])
        elif case.startswith("sha"):
            sha = test_sha_rnn_golden.load(case)
            made = Original("sha-rnn", _weights(sha.tensors), sha.original)
            made.tensors["blocks.0.lnout.weight"] = torch.ones(sha.config.width)
        elif case.startswith("fairseq"):
            fairseq = test_fairseq_golden.load(case)
            options = {"model": fairseq.original["model"]}
            made = Original("fairseq-adaptive-span", _weights(fairseq.tensors), options)
            made.tensors[TEMPLATE] = torch.arange(-3.0, 1)
        else:
            span = golden.Golden.load(case)
            made = Original("adaptive-span", _weights(span.tensors), span.original)
            made.tensors[TEMPLATE] = torch.arange(-3.0, 1)
        _add_second_names(made.tensors)
        return made

    def save(self, path: Path, *, legacy: bool = False) -> Path:
        torch.save(self._contents(), path, _use_new_zipfile_serialization=not legacy)
        return path

    def _contents(self) -> dict[str, Any]:
        if self.kind == "adaptive-span":
            model = {f"module.{name}": tensor for name, tensor in self.tensors.items()}
            return {"iter_no": 7, "model": model, "logger": {"loss": [1.5]}, "optimizer": {"state": {}}}
        if self.kind == "fairseq-adaptive-span":
            model = {f"decoder.model.{name}": tensor for name, tensor in self.tensors.items()}
            return {"args": None, "cfg": self.options, "model": model, "optimizer_history": [{"lr": 0.1}]}
        if self.kind == "sha-rnn":
            criterion = {name[10:]: t for name, t in self.tensors.items() if name.startswith("criterion.")}
            model = {name: t for name, t in self.tensors.items() if not name.startswith("criterion.")}
            return {"model": model, "criterion": criterion}
        return self.tensors


def _weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[8:]: tensor for name, tensor in tensors.items() if name.startswith("weights.")}


def _add_second_names(tensors: dict[str, Tensor]) -> None:
    persistent = any("persistent_memory" in name for name in tensors)
    for name in list(tensors):
        for first, second in SHARED.items():
            other = re.sub(first, second, name)
            if re.fullmatch(first, name) and (persistent or "persistent_memory" not in other):
                tensors.setdefault(other, tensors[name])


def _add_xl_extras(made: Original, model: dict[str, Any]) -> None:
    start = "transformer." if made.kind == "hf-transfo-xl" else ""
    made.tensors[f"{start}pos_emb.inv_freq"] = torch.ones(model["d_model"] // 2)
    for number in range(1, len(model["cutoffs"]) + 1):
        own = f"{start}word_emb.emb_projs.{0 if model['div_val'] == 1 else number}"
        if own in made.tensors:
            made.tensors[f"crit.out_projs.{number}"] = made.tensors[own]
    if start and not model["untie_r"]:
        for layer in range(model["n_layer"]):
            name = f"{start}layers.{layer}.dec_attn.r_w_bias"
            made.tensors[name] = made.tensors[f"{start}r_w_bias"]
