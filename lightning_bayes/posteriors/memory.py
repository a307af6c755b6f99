"""Memory limits for large matrices, checked before allocation."""

from __future__ import annotations

from lightning_bayes.errors import PosteriorError

DEFAULT_LIMIT_MIB = 1024.0


def require_memory(what: str, elements: int, bytes_each: int, limit_mib: float, instead: str) -> None:
    """Raise `PosteriorError` above the limit. The message starts with `what` and recommends `instead`."""
    size = elements * bytes_each
    if size > limit_mib * 2**20:
        raise PosteriorError(
            f"{what} would take {format_bytes(size)}, more than limit_mib={limit_mib:g}. Use {instead}, or raise limit_mib."
        )


def format_bytes(size: float) -> str:
    """A number of bytes with one decimal and a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
