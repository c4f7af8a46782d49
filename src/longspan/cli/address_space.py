"""The limit of the address space (`ulimit -v`), checked before torch is imported.

Where the limit is too small, torch and OpenBLAS end the process themselves, and no error can be caught.
"""

from __future__ import annotations

from longspan.errors import UserError

LEAST = 5 * 2**28
"""Bytes: torch for a CPU maps about half of it when it is imported, and its threads and OpenBLAS the rest."""


def check_address_space() -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST:
        raise UserError(
            f"there is not enough memory: the limit of {limit / 2**30:.2f} GiB of address space is below the "
            f"{LEAST / 2**30:.2f} GiB that torch needs; raise it, for example with 'ulimit -v unlimited'"
        )
