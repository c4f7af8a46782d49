"""Orthogonalises matrices by polynomials. Shapes: N matrices, R rows, C columns.

Every step is X = a X + b X X^T X + c (X X^T)² X: it maps each singular value s to a s + b s³ + c s⁵.
"""

from __future__ import annotations

import torch
from torch import Tensor

Polynomials = tuple[tuple[float, float, float], ...]

EPSILON = 1e-7
QUINTIC: Polynomials = ((3.4445, -4.7750, 2.0315),) * 5
"""Five equal steps (Jordan et al., 2024): singular values from 0.002 to 1 end between 0.68 and 1.21."""

SAFETY = 1.02
_OPTIMAL: Polynomials = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
POLAR_EXPRESS: Polynomials = (
    *((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in _OPTIMAL[:-1]),
    _OPTIMAL[-1],
)
"""Polar Express (Amsel et al., 2025): each step has the smallest possible error where the one before ends.

Singular values from 0.002 to 1 end between 0.87 and 1.13. All steps but the last see s / 1.02, and the norm
is divided out 1.02 times: the polynomials grow fast beyond their interval, which rounding may leave.
"""


def precise_enough(x_NRC: Tensor) -> Tensor:
    """On a GPU bfloat16 is precise enough for a direction."""
    return x_NRC.bfloat16() if x_NRC.is_cuda else x_NRC


def orthogonal(x_NRC: Tensor, polynomials: Polynomials = QUINTIC, safety: float = 1.0) -> Tensor:
    """U S' V^T for each X = U S V^T, with all of S' near 1: the steps from X / (`safety` times its norm).

    On a GPU in bfloat16. A matrix of zeros stays zero.
    """
    if x_NRC.shape[1] > x_NRC.shape[2]:
        # Contiguous: torch's operations on many tensors are slow for others.
        return orthogonal(x_NRC.mT, polynomials, safety).mT.contiguous()
    x_NRC = precise_enough(x_NRC)
    x_NRC = x_NRC / (safety * x_NRC.norm(dim=(1, 2), keepdim=True)).clamp(min=EPSILON)
    for a, b, c in polynomials:
        gram_NRR = x_NRC @ x_NRC.mT
        mixed_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, mixed_NRR, x_NRC, beta=a)
    return x_NRC
