"""A short text that a model writes in the middle of its training. Shapes: B = 1 text, T = 1 token."""

from __future__ import annotations

import torch

from longspan import distributed
from longspan.data import Tokenizer
from longspan.errors import UserError
from longspan.evaluation.evaluate import evaluating
from longspan.generation import sample
from longspan.models import LanguageModel

TEMPERATURE = 0.8


def sample_text(
    model: LanguageModel, tokenizer: Tokenizer, tokens: int, seed: int, device: torch.device
) -> str:
    """A text of so many tokens after a line end, always from the same random numbers.

    Training is not affected: the random numbers have a generator of their own. Compiled code is not used,
    since single tokens would compile it again, and nothing is kept between two tokens but the state.
    """
    generator = torch.Generator().manual_seed(seed)
    token, drawn = _line_end(tokenizer), list[int]()
    with torch.no_grad(), evaluating(model), torch.compiler.set_stance("force_eager"):
        state = distributed.initial_state(model, 1)
        for _ in range(tokens):
            log_probs_BTV, state = model.log_probs(torch.tensor([[token]], device=device), state)
            token = int(sample(log_probs_BTV[:, -1].float().cpu(), TEMPERATURE, generator=generator))
            drawn.append(token)
    return tokenizer.decode(drawn)


def _line_end(tokenizer: Tokenizer) -> int:
    try:
        ids = tokenizer.encode("\n")
    except UserError:  # a vocabulary without line ends
        return 0
    return int(ids[-1]) if len(ids) else 0
