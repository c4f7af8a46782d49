"""The texts that are being continued. Shapes: N texts, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.models import LanguageModel
from longspan.serving.jobs import GenerateJob, log
from longspan.serving.sampling import draw
from longspan.serving.slots import Slots


class Batch:
    """Jobs with their slots, and the log-probabilities of their next tokens."""

    def __init__(self, model: LanguageModel, slots: Slots) -> None:
        self._model, self._slots = model, slots
        self.jobs: list[GenerateJob] = []
        self.tokens = 0  # generated so far
        self._log_probs_NV: Tensor | None = None

    @property
    def size(self) -> int:
        return self._slots.size

    def join(self, job: GenerateJob) -> None:
        """Continue a text whose prompt has been read."""
        assert job.start is not None
        with torch.no_grad():
            first_NV = self._model.head.log_probs(job.start.hidden_D[None, None])[0].cpu()
        job.key = self._slots.add(job.start.state)
        self.jobs.append(job)
        before_NV = self._log_probs_NV
        self._log_probs_NV = first_NV if before_NV is None else torch.cat([before_NV, first_NV])

    def leave(self, leaving: Sequence[GenerateJob]) -> None:
        """Free the slots of some jobs."""
        if not leaving:
            return
        gone = set(map(id, leaving))
        for job in leaving:
            if job.key is not None:
                self._slots.remove(job.key)
                job.key = None
        stay = [n for n, job in enumerate(self.jobs) if id(job) not in gone]
        self.jobs = [self.jobs[n] for n in stay]
        if self._log_probs_NV is not None:
            self._log_probs_NV = self._log_probs_NV[stay] if stay else None

    def step(self) -> list[GenerateJob]:
        """One token for every text; the jobs that ended with it."""
        assert self._log_probs_NV is not None
        ended = self._fail_broken()
        if not self.jobs:
            return ended
        tokens = draw(self._log_probs_NV, [job.draws for job in self.jobs])
        self.tokens += len(tokens)
        self._push(tokens, self._log_probs_NV)
        jobs, done = self.jobs, [job for job in self.jobs if job.has_ended]
        pairs = zip(jobs, tokens, strict=True)
        continued = {job.key: token for job, token in pairs if not job.has_ended and job.key is not None}
        self.leave(done)
        try:
            self._read(continued, jobs)
        except Exception as problem:  # a step of the model failed; the texts that ended are sound
            log.exception("a step failed; the texts that were continued end")
            self.fail_all(problem)
        for job in jobs:
            job.deliver()
        return ended + done

    def fail_all(self, problem: Exception) -> None:
        """End all texts with an error."""
        failed = list(self.jobs)
        self.leave(failed)
        for job in failed:
            job.fail(problem)

    def _read(self, tokens: dict[int, int], jobs: Sequence[GenerateJob]) -> None:
        """Read a token of every text. While a GPU works, clients are told about the tokens before."""
        if not tokens:
            return
        pending = self._slots.launch(tokens)
        for job in jobs:
            job.deliver()
        self._log_probs_NV = pending()

    def _push(self, tokens: list[int], log_probs_NV: Tensor) -> None:
        own = log_probs_NV.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
        asked = [n for n, job in enumerate(self.jobs) if job.sampling.logprobs]
        if asked:
            most = max(self.jobs[n].sampling.logprobs or 0 for n in asked)
            best = log_probs_NV[asked].topk(min(most, log_probs_NV.shape[1]), dim=-1)
            for n, values, ids in zip(asked, best.values.tolist(), best.indices.tolist(), strict=True):
                count = self.jobs[n].sampling.logprobs
                tops[n] = tuple(zip(ids[:count], values[:count], strict=True))
        for job, token, log_prob, top in zip(self.jobs, tokens, own, tops, strict=True):
            job.push(token, log_prob, top)

    def _fail_broken(self) -> list[GenerateJob]:
        """End the texts whose probabilities are not numbers."""
        assert self._log_probs_NV is not None
        broken_N = self._log_probs_NV.isnan().any(dim=-1).tolist()
        failed = [job for job, broken in zip(self.jobs, broken_N, strict=True) if broken]
        self.leave(failed)
        for job in failed:
            job.fail(
                UserError(
                    "the model's probabilities are not numbers (NaN): its weights are broken or too large"
                )
            )
        return failed
