"""Every architecture in use: it writes what it would if it read all again, and scores as it declares."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longspan.config import EvaluationConfig, ShaRnnConfig, TransformerXLConfig
from longspan.data import TokenFile
from longspan.data.token_file import write_token_file
from longspan.data.tokenizers.character import CharacterTokenizer
from longspan.evaluation import evaluate
from longspan.generation import generate
from longspan.models import LanguageModel
from tests.models.test_contract import VARIANTS, VOCABULARY, make

LETTERS = "abcdefghijklmnopqrstuvwxyz"[:VOCABULARY]
TEXT = "".join(LETTERS[number * number % 97 % VOCABULARY] for number in range(80))
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def letters(tmp_path: Path) -> TokenFile:
    return write_token_file(tmp_path / "text.tokens", CharacterTokenizer(LETTERS), [TEXT.encode()])


def lively(variant: str) -> LanguageModel:
    """With larger matrices than fresh models have: what is seen matters."""
    model = make(variant)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.5)
    return model


def remembered(variant: str) -> int:
    """How long a text may be before what is forgotten depends on how it is cut into blocks."""
    config = VARIANTS[variant]
    from_zeros = isinstance(config, TransformerXLConfig) and config.start == "zeros"  # forgotten one by one
    assert isinstance(config, (TransformerXLConfig, ShaRnnConfig))
    return 1 if from_zeros else max(1, config.memory_length)


def loss(model: LanguageModel, text: TokenFile, block_length: int, max_tokens: int | None = None) -> float:
    score = evaluate(
        model,
        text,
        tokenizer=CharacterTokenizer(LETTERS),
        config=EvaluationConfig(batch_size=2 if max_tokens is None else 1),
        block_length=block_length,
        max_tokens=max_tokens,
        device="cpu",
    )
    assert score.tokens == (max_tokens or len(TEXT) - 1)
    return score.loss


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_and_single_tokens_score_alike_where_the_model_declares_it(
    variant: str, letters: TokenFile
) -> None:
    model = lively(variant)
    by_tokens, by_blocks = loss(model, letters, 1), loss(model, letters, 7)
    if model.block_invariant:
        assert by_tokens == pytest.approx(by_blocks, rel=1e-6)
        return
    # They part, but only where a single token has forgotten what a block still remembers, or the other way.
    assert abs(by_tokens - by_blocks) > 1e-5
    length = remembered(variant)
    assert loss(model, letters, 1, length) == pytest.approx(loss(model, letters, 7, length), rel=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_writes_what_it_would_write_if_it_read_all_again(variant: str) -> None:
    model = lively(variant)
    tokens = 25 if model.block_invariant else max(1, remembered(variant) + 1 - len(PROMPT))
    made = list(generate(model, PROMPT, tokens=tokens, temperature=0))
    text = list(PROMPT)
    with torch.no_grad():
        for _ in made:
            log_probs_BTV, _ = model.log_probs(torch.tensor([text]), model.initial_state(1))
            text.append(int(log_probs_BTV[0, -1].argmax()))
    assert made == text[len(PROMPT) :]
