"""All mistakes."""

from __future__ import annotations

from tests.abuse import (
    data_mistakes,
    general_mistakes,
    import_mistakes,
    recipe_mistakes,
    run_mistakes,
    serve_mistakes,
)

MISTAKES = [
    *general_mistakes.MISTAKES,
    *recipe_mistakes.MISTAKES,
    *run_mistakes.MISTAKES,
    *data_mistakes.MISTAKES,
    *import_mistakes.MISTAKES,
    *serve_mistakes.MISTAKES,
]
