"""Stub."""

from longspan import distributed
from longspan.runs import checkpoint


class ShardedWriter:
    def save(self, path, tensors, facts, keep=1):
        full = {k: distributed.full(t) for k, t in tensors.items()}
        if distributed.is_first():
            checkpoint.save(path, full, facts, keep)
        distributed.any_rank(False)

    def wait(self):
        pass
