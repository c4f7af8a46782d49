"""How text becomes numbers: one file per unit of text."""

from __future__ import annotations

import json
from pathlib import Path

from longspan.config import TokenizerConfig
from longspan.data.corpus import Corpus
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.data.tokenizers.interface import SETTINGS, Tokenizer, TokenStream, id_type
from longspan.errors import UserError

__all__ = ["TokenStream", "Tokenizer", "fit_tokenizer", "id_type", "load_tokenizer"]

_FIT = {
    "byte": ByteTokenizer.fit,
}
_FORMS: dict[str, type[Tokenizer]] = {cls.form: cls for cls in (ByteTokenizer,)}


def fit_tokenizer(config: TokenizerConfig, corpus: Corpus) -> Tokenizer:
    """The tokenizer a configuration describes, with a vocabulary learned from a corpus."""
    return _FIT[config.kind](config, corpus)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` put into `folder`."""
    path = Path(folder) / SETTINGS
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        return _FORMS[settings["form"]].from_settings(settings, Path(folder))
    except FileNotFoundError as problem:
        raise UserError(f"there is no tokenizer in {folder}: {problem.filename} is missing") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"the tokenizer in {folder} is damaged: put back the whole folder") from None
