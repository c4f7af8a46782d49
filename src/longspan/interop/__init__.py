"""Models from the checkpoints of the original implementations."""

from longspan.interop.original import KINDS, load_original

__all__ = ["KINDS", "load_original"]
