"""Scores of held-out text while a model is trained."""

from __future__ import annotations

from typing import Any

import torch

from longspan.config import RunConfig
from longspan.data import GivenTokens, TokenizedCorpus
from longspan.evaluation import Score, evaluate
from longspan.models import LanguageModel
from longspan.training.divergence import DivergenceCheck
from longspan.training.interrupt import Interrupt
from longspan.training.out_of_memory import within_memory_of_evaluation
from longspan.training.reporter import Reporter
from longspan.training.run_progress import RunProgress
from longspan.training.strategy import Strategy


class Scoring:
    """Scores the splits of a corpus with the weights that the model has.

    Parts that training compiled run in eager mode, as in `longspan eval`: each would be compiled a second
    time, for float32 and without gradients, which takes longer than most scores.
    """

    def __init__(
        self,
        model: LanguageModel,
        corpus: TokenizedCorpus | GivenTokens,
        config: RunConfig,
        *,
        strategy: Strategy,
        device: torch.device,
        divergence: DivergenceCheck,
        interrupt: Interrupt,
        reporter: Reporter,
    ) -> None:
        self._model, self._corpus, self._config = model, corpus, config
        self._strategy, self._device = strategy, device
        self._divergence, self._interrupt, self._reporter = divergence, interrupt, reporter

    def judge(
        self, split: str, max_tokens: int | None, progress: RunProgress
    ) -> tuple[Score, dict[str, Any]]:
        """The score by which weights are compared, and it and all others as fields of a line of metrics."""
        score, others = self._strategy.judge(lambda: self._score(split, max_tokens, progress))
        return score, score.figures() | {name: other.figures() for name, other in others.items()}

    def _score(self, split: str, max_tokens: int | None, progress: RunProgress) -> Score:
        def show(done: int, total: int) -> None:
            self._interrupt.check()
            self._reporter.status(f"scoring {split}: {done:,} of {total:,} tokens", done / total)

        with (
            within_memory_of_evaluation(self._config.evaluation, self._config.training.block_length),
            self._strategy.fallback.eager(),
        ):
            score = evaluate(
                self._model,
                self._corpus.splits[split],
                tokenizer=self._corpus.tokenizer,
                config=self._config.evaluation,
                block_length=self._config.training.block_length,
                max_tokens=max_tokens,
                device=self._device,
                progress=show,
            )
        self._divergence.check_score(score, split, progress)
        return score
