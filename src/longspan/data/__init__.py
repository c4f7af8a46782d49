"""Named corpora, tokenizers, token files, lanes and segments."""

from longspan.data.corpus import Corpus
from longspan.data.given import GivenTokens, TokenArray, given_tokens, token_array
from longspan.data.lanes import BlockSource, LanePosition, Lanes, SomeLanes, TokenBlock, check_fits
from longspan.data.preparation import TokenizedCorpus, prepare
from longspan.data.segments import Segments
from longspan.data.statistics import count_tokens, order_0_entropy
from longspan.data.token_file import TokenFile
from longspan.data.tokenizers import Tokenizer, TokenStream, load_tokenizer

__all__ = [
    "BlockSource",
    "Corpus",
    "GivenTokens",
    "LanePosition",
    "Lanes",
    "Segments",
    "SomeLanes",
    "TokenArray",
    "TokenBlock",
    "TokenFile",
    "TokenStream",
    "TokenizedCorpus",
    "Tokenizer",
    "check_fits",
    "count_tokens",
    "given_tokens",
    "load_tokenizer",
    "order_0_entropy",
    "prepare",
    "token_array",
]
