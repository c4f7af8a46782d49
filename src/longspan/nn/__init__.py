"""Parts for models of your own, in plain PyTorch: no recipes, no configuration, no `State`.

| part | meaning |
|---|---|
| `LearnedSpan` | how far back each head looks, learned |
| `DynamicSpan` | how far back each head looks at each token, computed from the layer's input |
| `span_attention` | attention over spans, with memory, distance keys and persistent vectors |
| `PersistentMemory` | learned keys and values that every query sees |
| `LearnedDistanceKeys` | relative positions: one learned key per distance |
| `SinusoidDistances` | relative positions of Transformer-XL: projected sinusoids and two biases |
| `AdaptiveEmbedding` | embedding that is narrower for rare words |
| `AdaptiveSoftmaxHead` | softmax in two steps over the same clusters of words |
| `Boom` | SHA-RNN's feed-forward block |
| `SHABlock` | a layer of SHA-RNN: LSTM, attention with a single head, Boom |
| `NgramEmbeddings` | embeddings of the last n tokens |

docs/nn.md has signatures and snippets. The optimizers are in `longspan.optim`.
"""

from longspan.layers.dynamic_span import DynamicSpan
from longspan.layers.embeddings import AdaptiveEmbedding
from longspan.layers.learned_span import LearnedSpan
from longspan.layers.persistent_memory import PersistentMemory
from longspan.layers.positions import LearnedDistanceKeys, SinusoidDistances
from longspan.nn.attention import span_attention
from longspan.nn.boom import Boom
from longspan.nn.ngrams import NgramEmbeddings
from longspan.nn.sha_block import SHABlock
from longspan.output import AdaptiveSoftmaxHead

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveSoftmaxHead",
    "Boom",
    "DynamicSpan",
    "LearnedDistanceKeys",
    "LearnedSpan",
    "NgramEmbeddings",
    "PersistentMemory",
    "SHABlock",
    "SinusoidDistances",
    "span_attention",
]
