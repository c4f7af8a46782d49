"""Named corpora, tokenizers, token files, lanes and segments."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longspan.data.corpus import Corpus as Corpus
    from longspan.data.given import GivenTokens as GivenTokens
    from longspan.data.given import TokenArray as TokenArray
    from longspan.data.given import given_tokens as given_tokens
    from longspan.data.given import token_array as token_array
    from longspan.data.lanes import BlockSource as BlockSource
    from longspan.data.lanes import LanePosition as LanePosition
    from longspan.data.lanes import Lanes as Lanes
    from longspan.data.lanes import SomeLanes as SomeLanes
    from longspan.data.lanes import TokenBlock as TokenBlock
    from longspan.data.lanes import check_fits as check_fits
    from longspan.data.preparation import TokenizedCorpus as TokenizedCorpus
    from longspan.data.preparation import prepare as prepare
    from longspan.data.segments import Segments as Segments
    from longspan.data.statistics import count_tokens as count_tokens
    from longspan.data.statistics import order_0_entropy as order_0_entropy
    from longspan.data.token_file import TokenFile as TokenFile
    from longspan.data.tokenizers import Tokenizer as Tokenizer
    from longspan.data.tokenizers import TokenStream as TokenStream
    from longspan.data.tokenizers import load_tokenizer as load_tokenizer

# Imported when first used: the processes that encode text need a tokenizer but no torch.
_PUBLIC = {
    "BlockSource": "lanes",
    "Corpus": "corpus",
    "GivenTokens": "given",
    "LanePosition": "lanes",
    "Lanes": "lanes",
    "Segments": "segments",
    "SomeLanes": "lanes",
    "TokenArray": "given",
    "TokenBlock": "lanes",
    "TokenFile": "token_file",
    "TokenStream": "tokenizers",
    "TokenizedCorpus": "preparation",
    "Tokenizer": "tokenizers",
    "check_fits": "lanes",
    "count_tokens": "statistics",
    "given_tokens": "given",
    "load_tokenizer": "tokenizers",
    "order_0_entropy": "statistics",
    "prepare": "preparation",
    "token_array": "given",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
