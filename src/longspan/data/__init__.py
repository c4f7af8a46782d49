"""Named corpora, tokenizers, token files, lanes and segments."""

from longspan.data.lanes import LanePosition, Lanes, TokenBlock, check_fits
from longspan.data.preparation import TokenizedCorpus, prepare
from longspan.data.segments import Segments
from longspan.data.statistics import count_tokens, order_0_entropy
from longspan.data.token_file import TokenFile
from longspan.data.tokenizers import Tokenizer, TokenStream, load_tokenizer

__all__ = [
    "LanePosition",
    "Lanes",
    "Segments",
    "TokenBlock",
    "TokenFile",
    "TokenStream",
    "TokenizedCorpus",
    "Tokenizer",
    "check_fits",
    "count_tokens",
    "load_tokenizer",
    "order_0_entropy",
    "prepare",
]
