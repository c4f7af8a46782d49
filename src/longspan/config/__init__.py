"""What a run is: typed, validated, TOML in and out, every field documented once."""

from longspan.config.data import DataConfig, TokenizerConfig
from longspan.config.gpt import GptConfig
from longspan.config.model import AdaptiveSpanConfig, AllAttentionConfig, ModelConfig
from longspan.config.modern import ModernConfig
from longspan.config.run import RunConfig
from longspan.config.search import SearchConfig
from longspan.config.sha_rnn import ShaRnnConfig
from longspan.config.span import SpanConfig
from longspan.config.stage import StageConfig
from longspan.config.training import EvaluationConfig, TrainingConfig
from longspan.config.transformer_xl import TransformerXLConfig
from longspan.config.vocabulary import VocabularyConfig

__all__ = [
    "AdaptiveSpanConfig",
    "AllAttentionConfig",
    "DataConfig",
    "EvaluationConfig",
    "GptConfig",
    "ModelConfig",
    "ModernConfig",
    "RunConfig",
    "SearchConfig",
    "ShaRnnConfig",
    "SpanConfig",
    "StageConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "TransformerXLConfig",
    "VocabularyConfig",
]
