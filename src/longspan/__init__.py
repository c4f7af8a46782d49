"""Longspan: language models that remember."""

__version__ = "0.1.0"
