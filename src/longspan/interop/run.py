"""A run folder from a checkpoint of an original implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pooch

from longspan.config import (
    AdaptiveSpanConfig,
    AllAttentionConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    RunConfig,
    TokenizerConfig,
)
from longspan.data import TokenizedCorpus, Tokenizer, corpora, prepare
from longspan.data.data_bin import is_data_bin
from longspan.data.download import Progress
from longspan.data.tokenizers.number import NumberTokenizer
from longspan.errors import UserError
from longspan.home import expanded
from longspan.interop.original import read_original
from longspan.models import LanguageModel
from longspan.runs import RunFolder

Project = Literal["adaptive-span", "sha-rnn", "transformer-xl"]
# The project whose tokenizer and protocol a kind uses.
PROJECTS: dict[str, Project] = {
    "adaptive-span": "adaptive-span",
    "sha-rnn": "sha-rnn",
    "transformer-xl": "transformer-xl",
    "hf-transfo-xl": "transformer-xl",
}


def import_run(
    path: Path,
    kind: str,
    out: Path,
    corpus: str | None,
    config: Any = None,
    *,
    url: str | None = None,
    progress: Progress,
) -> RunFolder:
    """Make the run folder `out` from a checkpoint, with the vocabulary that its project built from `corpus`.

    The originals' checkpoints have no vocabulary: the corpus must be the one that the model was trained on.
    For `gpt-spans` the vocabulary is the sorted characters of the text. Without a corpus the run reads and
    writes token numbers. So does a run of fairseq's, unless the corpus is a folder that fairseq prepared,
    with its dictionary. `url` says where the file is from. The SHA-256 of the file is noted in the run
    folder.
    """
    RunFolder.must_be_new(out)
    model_config, model = read_original(path, kind, config)
    data = DataConfig(
        corpus="" if corpus is None else corpora.anchored(corpus),
        tokenizer=_tokenizer(kind, corpus, model_config, model.vocabulary_size),
    )
    tokenizer: Tokenizer = NumberTokenizer(model.vocabulary_size)
    fingerprint = ""
    if corpus is not None:
        prepared = prepare(data, progress)
        _check_vocabulary(model, prepared, path)
        tokenizer, fingerprint = prepared.tokenizer, prepared.fingerprint
    digest = pooch.file_hash(str(path), alg="sha256")
    run_config = RunConfig(
        name=out.absolute().name,
        description=f"Imported from {url or path.name} (SHA-256 {digest}), a checkpoint of the kind {kind}",
        data=data,
        model=model_config,
        evaluation=EvaluationConfig(protocol=PROJECTS.get(kind, "every-token")),
    )
    facts = {"imported": {"file": path.name, "kind": kind, "url": url, "sha256": digest}}
    return RunFolder.create_with_weights(
        out, run_config, tokenizer, fingerprint, model.state_dict(), facts, _spans(model)
    )


def _spans(model: LanguageModel) -> dict[str, Any] | None:
    """The line of spans.jsonl at step 0: nothing was trained here."""
    spans = model.records().get("spans")
    return None if spans is None else {"step": 0, **spans}


def _tokenizer(kind: str, corpus: str | None, model: ModelConfig, vocabulary_size: int) -> TokenizerConfig:
    if corpus is not None and is_data_bin(expanded(corpus)):
        return TokenizerConfig(kind="fairseq")
    if corpus is not None and kind == "gpt-spans":
        return TokenizerConfig(kind="character", order="sorted")
    if corpus is None or kind not in PROJECTS:
        return TokenizerConfig(kind="number", vocabulary_size=vocabulary_size)
    # adaptive-span sorts words by frequency only for adaptive input and softmax, the others always.
    plain = isinstance(model, AdaptiveSpanConfig | AllAttentionConfig) and not model.vocabulary.cutoffs
    return TokenizerConfig(kind=PROJECTS[kind], order="first-seen" if plain else "frequency")


def _check_vocabulary(model: LanguageModel, corpus: TokenizedCorpus, path: Path) -> None:
    found = corpus.tokenizer.vocabulary_size
    if found != model.vocabulary_size:
        raise UserError(
            f"{path} was trained with a vocabulary of {model.vocabulary_size:,}, but {corpus.name} has "
            f"{found:,}: give with --data the corpus it was trained on"
        )
