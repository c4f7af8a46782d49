"""Options of SHA-RNN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longspan.config.schema import option


@dataclass(frozen=True, kw_only=True)
class ShaRnnConfig:
    """The network of "Single Headed Attention RNN" (Merity, 2019)."""

    num_layers: int = option(4, help="layers: LSTM, attention (in some), feed-forward")
    width: int = option(1024, help="size of the hidden states")
    inner_width: int = option(4096, help="inner size of the feed-forward layer")
    attention: Literal["second-last", "every", "none"] = option(
        "second-last", help="which layers have attention (the original code: second-last)"
    )
    memory_length: int = option(
        5000, help="positions that attention sees, including the block; 0: only the block"
    )
    dropout: float = option(0.0, help="dropout inside the layers and on their outputs")
    embedding_dropout: float = option(0.0, help="dropout on the embeddings and on the last layer's output")
    weight_drop: float = option(
        0.0, help="dropout on the recurrent matrices of the LSTMs, one mask per block of tokens"
    )
    tied: bool = option(True, help="use the embedding's weights in the output layer")
    splits: tuple[int, ...] = option(
        (), help="two-step softmax for large vocabularies: the first token of each part, in increasing order"
    )

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.width < 1:
            raise ValueError("num_layers and width must be at least 1")
        if self.attention == "second-last" and self.num_layers < 2:
            raise ValueError("attention in the second-last layer needs num_layers of at least 2")
        if self.inner_width < self.width:
            raise ValueError(f"inner_width {self.inner_width} must be at least the width, {self.width}")
        if self.memory_length < 0:
            raise ValueError("memory_length must not be negative")
        if not all(0.0 <= part < 1.0 for part in (self.dropout, self.embedding_dropout, self.weight_drop)):
            raise ValueError("dropout, embedding_dropout and weight_drop must be at least 0 and below 1")
        if any(first >= second for first, second in zip((0, *self.splits), self.splits, strict=False)):
            raise ValueError("splits must be above 0 and increase")

    def attends(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has attention."""
        return self.attention == "every" or (self.attention == "second-last" and layer == self.num_layers - 2)
