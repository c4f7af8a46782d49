"""The fixtures of the training tests: a small run."""

from tests.training.conftest import text, uninterrupted

__all__ = ["text", "uninterrupted"]
