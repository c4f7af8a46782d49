"""Options of the GPT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longspan.config.schema import option, section
from longspan.config.span import SpanConfig
from longspan.config.vocabulary import VocabularyConfig


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    """A GPT (Radford et al., 2018), plain or with a learned span in every head."""

    num_layers: int = option(8, help="layers, each attention followed by feed-forward")
    width: int = option(512, help="size of the hidden states")
    num_heads: int = option(8, help="attention heads per layer")
    inner_width: int = option(2048, help="inner size of the feed-forward layer")
    activation: Literal["gelu", "relu"] = option("gelu", help="activation of the feed-forward layer")
    output_bias: bool = option(False, help="a bias in the output projection of attention")
    context: int = option(
        4096, help="tokens of a context; the text is read in contexts that do not see each other"
    )
    dropout: float = option(
        0.0, help="dropout on embeddings, attention weights, and the outputs of all layers"
    )
    span: SpanConfig | None = option(
        None, help="spans of the heads, with a limit of at most context (default: the whole context)"
    )
    vocabulary: VocabularyConfig = section(VocabularyConfig, help="embedding and output layer")

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "num_heads", "inner_width", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError("dropout must be at least 0 and below 1")
        if self.span is not None and self.span.limit > self.context:
            raise ValueError(f"span.limit {self.span.limit} is longer than the context, {self.context}")
