"""Registers what comes with the package, with the same functions that plugins use.

Objects that need torch or numpy are given by name and imported on first use, so that help texts and errors
appear without delay.
"""

from __future__ import annotations

from longspan.config import (
    AdaptiveSpanConfig,
    AllAttentionConfig,
    GptConfig,
    ModernConfig,
    ShaRnnConfig,
    TransformerXLConfig,
)
from longspan.registry import register_architecture, register_block, register_corpus, register_tokenizer

register_architecture("adaptive-span", AdaptiveSpanConfig, "longspan.models.adaptive_span:adaptive_span")
register_architecture("all-attention", AllAttentionConfig, "longspan.models.all_attention:all_attention")
register_architecture("gpt", GptConfig, "longspan.models.gpt:gpt")
register_architecture("modern", ModernConfig, "longspan.models.modern:modern")
register_architecture("sha-rnn", ShaRnnConfig, "longspan.models.sha_rnn:sha_rnn")
register_architecture("transformer-xl", TransformerXLConfig, "longspan.models.transformer_xl:transformer_xl")

# Every architecture builds these itself.
register_block("s", "attention", None)
register_block("l", "long attention", None)
register_block("f", "feed-forward", None)
register_block("i", "identity", None)

_TOKENIZERS = "longspan.data.tokenizers"
register_tokenizer("byte", f"{_TOKENIZERS}.byte:ByteTokenizer", options=["lowercase"])
register_tokenizer("character", f"{_TOKENIZERS}.character:CharacterTokenizer", options=["lowercase", "order"])
register_tokenizer(
    "word", f"{_TOKENIZERS}.word:WordTokenizer", options=["vocabulary_size", "lowercase", "order"]
)
register_tokenizer(
    "number", f"{_TOKENIZERS}.number:NumberTokenizer", options=["vocabulary_size", "lowercase"]
)
register_tokenizer(
    "sentencepiece",
    f"{_TOKENIZERS}.sentence_piece:SentencePieceTokenizer",
    options=["vocabulary_size", "lowercase"],
)
register_tokenizer(
    "sentencepiece-default",
    f"{_TOKENIZERS}.sentence_piece:DefaultSentencePieceTokenizer",
    options=["vocabulary_size", "lowercase"],
)
register_tokenizer("bpe", f"{_TOKENIZERS}.bpe:BpeTokenizer", options=["vocabulary_size", "lowercase"])
register_tokenizer("adaptive-span", f"{_TOKENIZERS}.originals:OriginalTokenizer", options=["order"])
register_tokenizer("fairseq", f"{_TOKENIZERS}.fairseq:FairseqTokenizer")
register_tokenizer("sha-rnn", f"{_TOKENIZERS}.originals:OriginalTokenizer")
register_tokenizer("transformer-xl", f"{_TOKENIZERS}.originals:OriginalTokenizer")

_CORPORA = "longspan.data.corpora"
register_corpus(
    "python", f"{_CORPORA}:python", about="the sources of Python's standard library on this machine"
)
register_corpus("enwik8", f"{_CORPORA}:enwik8", about="the first 100 MB of an English Wikipedia dump of 2006")
register_corpus("text8", f"{_CORPORA}:text8", about="100 MB of English Wikipedia, only letters and blanks")
register_corpus(
    "wikitext-2",
    f"{_CORPORA}:wikitext_2",
    about="good Wikipedia articles, 2 million words, rare ones <unk>",
)
register_corpus(
    "wikitext-103",
    f"{_CORPORA}:wikitext_103",
    about="good Wikipedia articles, 103 million words, rare ones <unk>",
)
register_corpus(
    "ptb",
    f"{_CORPORA}:ptb",
    about="the Penn Treebank as Mikolov prepared it: 1 million words of news, rare ones <unk>",
)
