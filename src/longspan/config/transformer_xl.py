"""Options of Transformer-XL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from longspan.config.pattern import block_options, check_pattern, letters
from longspan.config.schema import option, section
from longspan.config.span import SpanConfig
from longspan.config.vocabulary import check_cluster_widths, check_cutoffs


@dataclass(frozen=True, kw_only=True)
class XLVocabularyConfig:
    """Embedding and output layer of Transformer-XL."""

    cutoffs: tuple[int, ...] = option(
        (), help="cutoffs of the adaptive softmax in the vocabulary, sorted by frequency; none: plain softmax"
    )
    division: int = option(1, help="how many times narrower each cluster is than the one before")
    cluster_widths: tuple[int, ...] = option(
        (), help="in place of division: the width of each cluster, the first included"
    )
    divided: Literal["both", "head"] = option(
        "both", help="the embedding narrows with the clusters too, or is one table for all words"
    )
    table_width: int | None = option(None, help="width of the embedding's table (default: the model's width)")
    tied: bool = option(True, help="use the embedding's tables in the output layer")
    tied_projections: Literal["none", "all-but-first", "all"] | tuple[bool, ...] = option(
        "all-but-first",
        help="which clusters of the output layer use the embedding's projections, if it has any; or a list "
        "with true or false for each cluster",
    )
    cluster_order: Literal["from-end", "forward"] = option(
        "from-end", help="cluster 1 is the last column of the first softmax (from-end) or its first"
    )

    def __post_init__(self) -> None:
        check_cutoffs(self.cutoffs)
        if self.division < 1 or (self.table_width is not None and self.table_width < 1):
            raise ValueError("division and table_width must be at least 1")
        if len(self.ties) != len(self.cutoffs) + 1:
            raise ValueError(
                f"tied_projections has {len(self.ties)} entries for {len(self.cutoffs) + 1} clusters"
            )
        check_cluster_widths(self.cluster_widths, self.cutoffs)
        if self.cluster_widths and (self.division != 1 or self.table_width is not None):
            raise ValueError(
                "division and table_width have no effect with cluster_widths: leave out one or the other"
            )
        if self.divided == "head" and (self.tied or not self.narrows):
            raise ValueError('divided = "head" needs tied = false, and a division above 1 or cluster_widths')

    @property
    def narrows(self) -> bool:
        """Whether every cluster has a table of its own, with its own width."""
        return self.division > 1 or bool(self.cluster_widths)

    @property
    def ties(self) -> tuple[bool, ...]:
        """Whether the projection is tied, for each cluster."""
        if isinstance(self.tied_projections, tuple):
            return self.tied_projections
        further = self.tied_projections != "none"
        return (self.tied_projections == "all", *[further] * len(self.cutoffs))


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig:
    """The transformer of "Transformer-XL" (Dai et al., 2019).

    No weight depends on memory_length, long_memory_length, same_length or clamp_length: they may be changed
    for evaluation.
    """

    num_layers: int = option(12, help="layers, each attention followed by feed-forward")
    pattern: str | None = option(
        None,
        help=lambda: (
            f"one letter per block: {letters('slfi')}; num_layers is then not used "
            "(default: sf for every layer)"
        ),
    )
    width: int = option(512, help="size of the hidden states; even")
    num_heads: int = option(8, help="attention heads per layer")
    head_width: int | None = option(None, help="size of a head (default: width / num_heads)")
    inner_width: int = option(2048, help="inner size of the feed-forward layer")
    dropout: float = option(
        0.0, help="dropout on embeddings, sinusoids, all layers' outputs, and inside them"
    )
    attention_dropout: float = option(0.0, help="dropout on attention weights")
    norm: Literal["post", "pre"] = option("post", help="post-norm (original) or pre-norm; no norm at the end")
    memory_length: int = option(512, help="hidden states that each layer remembers from before the block")
    long_memory_length: int | None = option(
        None, help="memory_length of long attention, l, in the pattern or the candidates"
    )
    same_length: bool = option(
        False, help="every position sees exactly memory_length positions, including itself"
    )
    clamp_length: int | None = option(None, help="larger distances count as this one")
    start: Literal["empty", "zeros"] = option(
        "empty", help="a text begins without memory, or with zeros that take part in attention (Hugging Face)"
    )
    biases: Literal["shared", "per-layer"] = option(
        "shared", help="the two query biases are shared by all layers, or per layer"
    )
    num_persistent: int = option(
        0, help="persistent vectors (keys and values) per head, as in all-attention", old_name="num_slots"
    )
    span: SpanConfig | None = option(
        None, help="spans as in adaptive-span, with limit = memory_length (default: the whole memory)"
    )
    vocabulary: XLVocabularyConfig = section(XLVocabularyConfig, help="embedding and output layer")
    blocks: dict[str, Any] = block_options()

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "num_heads", "inner_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.pattern is not None:
            check_pattern(self.pattern)
            if "l" in self.pattern and self.span is not None:
                raise ValueError("long attention, l, cannot be combined with a span: leave out one of them")
            if "l" in self.pattern and self.long_memory_length is None:
                raise ValueError(f"pattern '{self.pattern}' has long attention, l: give long_memory_length")
        if self.width % 2:
            raise ValueError(f"width must be even, half sines and half cosines, not {self.width}")
        if self.head_width is None and self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} is not a multiple of num_heads {self.num_heads}: give a head_width"
            )
        if self.head_width is not None and self.head_width < 1:
            raise ValueError("head_width must be at least 1")
        if min(self.memory_length, self.num_persistent) < 0 or (self.clamp_length or 0) < 0:
            raise ValueError("memory_length, num_persistent and clamp_length must not be negative")
        # Without a pattern it is for a search. With a pattern that has no l it is not used.
        long = self.long_memory_length
        if long is not None and long <= self.memory_length and "l" in (self.pattern or "l"):
            raise ValueError(f"long_memory_length, {long}, must be above memory_length, {self.memory_length}")
        if self.long_memory_length is not None and self.span is not None:
            raise ValueError("long_memory_length cannot be combined with a span: leave out one of them")
        if self.same_length and self.memory_length < 1:
            raise ValueError("same_length needs a memory_length of at least 1")
        if self.span is not None and (self.same_length or self.span.limit != self.memory_length):
            raise ValueError("with a span, same_length must be false and span.limit equal to memory_length")
        if not all(0.0 <= part < 1.0 for part in (self.dropout, self.attention_dropout)):
            raise ValueError("dropout and attention_dropout must be at least 0 and below 1")
