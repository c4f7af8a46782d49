"""Small things to use: a model, a token file, a run folder, none of them trained."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch

from longspan.config import (
    AdaptiveSpanConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    SpanConfig,
    TokenizerConfig,
)
from longspan.data import TokenFile, Tokenizer, corpora
from longspan.data.fingerprint import fingerprint
from longspan.data.token_file import write_token_file
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.models import LanguageModel, build
from longspan.runs import RunFolder, checkpoint

MODEL = AdaptiveSpanConfig(
    num_layers=2, width=16, num_heads=2, inner_width=16, span=SpanConfig(limit=12, ramp=4, start=0.5)
)


def tiny_model(vocabulary_size: int = 256, config: ModelConfig = MODEL) -> LanguageModel:
    torch.manual_seed(0)
    return build(config, vocabulary_size).eval()


def token_file(folder: Path, text: bytes, tokenizer: Tokenizer | None = None) -> TokenFile:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{len(list(folder.iterdir()))}.tokens"
    return write_token_file(path, tokenizer or ByteTokenizer(), [text])


def fingerprint_of(corpus: str, tokenizer: TokenizerConfig) -> str:
    return fingerprint(corpora.find(corpus, lambda line: None), tokenizer)


standard_library = cache(fingerprint_of)  # 30 MB, which stay as they are


def run_folder(
    path: Path, tokenizer: Tokenizer | None = None, corpus: str = "python", model: ModelConfig = MODEL
) -> RunFolder:
    """A run that never was: fresh weights as `best` and `last`, and three moments of spans."""
    tokenizer = tokenizer or ByteTokenizer()
    config = RunConfig(
        name="tiny",
        model=model,
        data=DataConfig(
            corpus=corpus,
            tokenizer=TokenizerConfig(kind=tokenizer.kind, lowercase=tokenizer.lowercase),  # type: ignore[arg-type]
        ),
    )
    find = standard_library if corpus == "python" else fingerprint_of
    run = RunFolder.create(path, config, tokenizer, find(corpus, config.data.tokenizer))
    weights = tiny_model(tokenizer.vocabulary_size, model).state_dict()
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    for which in ("best", "last"):
        checkpoint.save(run.checkpoint(which), tensors, {"step": 30})
    moments = [{"step": 10 * n, "limit": 12, "spans": [[4, 4 + n], [4 + 2 * n, 4]]} for n in (1, 2, 3)]
    run.spans.write_text("".join(json.dumps(moment) + "\n" for moment in moments))
    return run
