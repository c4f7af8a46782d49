"""Options of the modern transformer with spans and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from longspan.config.schema import option, section
from longspan.config.span import SpanConfig

_LONGEST_NGRAM = 64  # far beyond what repeats in a text


@dataclass(frozen=True, kw_only=True)
class ModernConfig:
    """A current transformer with spans and memory."""

    REMOVED: ClassVar[frozenset[str]] = frozenset({"attention_gates", "smear", "skip", "backout"})
    """Options of earlier versions (see `schema.read`)."""

    num_layers: int = option(12, help="layers, each attention followed by feed-forward")
    width: int = option(512, help="size of the hidden states")
    num_heads: int = option(8, help="attention heads per layer")
    inner_width: int = option(2048, help="inner size of the feed-forward layer")
    feed_forward: Literal["relu", "gelu", "squared-relu", "swiglu"] = option(
        "squared-relu", help="activation of the feed-forward layer; swiglu has three matrices, the others two"
    )
    positions: Literal["rotary", "learned", "none"] = option(
        "rotary",
        help="position encoding: rotary (RoPE), one learned key per distance (as in adaptive-span), or none",
    )
    rope_base: float = option(
        10000.0,
        help="RoPE base; the longest wavelength is about 6.3 times this many positions",
        old_name="rotary_base",
    )
    rope_fraction: float = option(
        1.0, help="the part of each head that RoPE rotates; the rest matches by content at any distance"
    )
    convolution: int = option(
        0, help="width of a causal convolution over the embeddings, in tokens; 0 for none"
    )
    ngrams: tuple[int, ...] = option(
        (),
        help="add embeddings of n-grams, one table per n: 2 for pairs, 3 for triples, and so on",
    )
    ngram_rows: int = option(
        4096, help="rows of each n-gram table; more n-grams than rows share them by a hash"
    )
    ngram_width: int | None = option(
        None, help="columns of the n-gram tables; if fewer than width, a matrix widens them (default: width)"
    )
    ngram_dropout: float = option(
        0.0,
        help="probability that an n-gram table is dropped for a token, from epoch 2 on: otherwise rare "
        "n-grams are memorised",
    )
    ngram_dropout_epochs: int = option(
        1,
        help="epochs in which ngram_dropout grows to its value, in equal steps from epoch 2 on: 1 for small "
        "texts, 3 for large ones, of which less is memorised in an epoch",
    )
    qk_norm: bool = option(True, help="QK-norm in every head", old_name="query_key_norm")
    qk_gain: float = option(1.0, help="with QK-norm: the learned scale of scores at the start")
    value_embeddings: bool = option(
        False,
        help="every other layer, the last included, adds a further embedding of the token to its values, "
        "with a learned gate per head; needs memory = keys-values",
    )
    key_offset: bool = option(
        False,
        help="the part of a key that RoPE does not rotate comes from the token before: a head then finds "
        "what followed a match; needs rope_fraction below 1 and memory = keys-values",
    )
    token_shift: bool = option(
        False, help="the first feed-forward layer reads half of its channels from the token before"
    )
    residual_scalars: bool = option(
        False, help="every layer reads a weighted sum of the residual stream and the normed embedding"
    )
    memory: Literal["hidden", "keys-values"] = option(
        "hidden",
        help="remember hidden states and project them again in every block, or keep keys and values: "
        "cheaper, but no gradient reaches the projections through the memory",
    )
    dropout: float = option(
        0.0,
        help="dropout on embeddings, attention weights, the outputs of all layers, and the input of the "
        "output layer",
    )
    repeat_dropout: float = option(
        0.0,
        help="dropout as above but not on attention weights; it ramps in from epoch 4 and has this "
        "value from epoch 19 on",
    )
    tied: bool = option(False, help="use the embedding's weights in the output layer")
    softcap: float | None = option(None, help="limit logits to this value by tanh (default: no limit)")
    span: SpanConfig = section(SpanConfig, help="where a head may look")

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "num_heads", "inner_width", "ngram_dropout_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")
        if self.positions == "rotary" and self.width // self.num_heads % 2:
            raise ValueError(
                f"rotary positions need an even head width: width / num_heads is "
                f"{self.width // self.num_heads}"
            )
        if self.convolution < 0 or self.convolution == 1:
            raise ValueError("convolution must be 0 for none, or at least 2")
        if not all(2 <= n <= _LONGEST_NGRAM for n in self.ngrams) or len(set(self.ngrams)) < len(self.ngrams):
            raise ValueError(
                f"ngrams must be different numbers of tokens, each at least 2 and at most {_LONGEST_NGRAM}"
            )
        if not 1 <= self.ngram_rows < 2**31:
            raise ValueError("ngram_rows must be at least 1 and below 2147483648")
        if self.ngram_width is not None and not 1 <= self.ngram_width <= self.width:
            raise ValueError(f"ngram_width must be between 1 and width {self.width}")
        if not 0.0 < self.rope_fraction <= 1.0:
            raise ValueError("rope_fraction must be above 0 and at most 1")
        if self.key_offset and self.positions != "rotary":
            raise ValueError('key_offset needs positions = "rotary"')
        pairs = self.width // self.num_heads // 2
        if self.key_offset and max(1, round(self.rope_fraction * pairs)) == pairs:
            raise ValueError(f"key_offset needs a smaller rope_fraction: of {pairs} pairs RoPE rotates all")
        for name in ("key_offset", "value_embeddings"):
            if getattr(self, name) and self.memory != "keys-values":
                raise ValueError(f'{name} needs memory = "keys-values"')
        if not self.qk_gain > 0.0:
            raise ValueError("qk_gain must be above 0")
        if not self.rope_base > 1.0:
            raise ValueError("rope_base must be above 1")
        for name in ("dropout", "ngram_dropout", "repeat_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1")
        if 0.0 < self.repeat_dropout <= self.dropout:
            raise ValueError("repeat_dropout must be above dropout, or 0 for none")
        if self.softcap is not None and not self.softcap > 0.0:
            raise ValueError("softcap must be above 0")
