"""The memory of a covariance, checked before it is allocated."""

from __future__ import annotations

from lightning_bayes.errors import PosteriorError

DEFAULT_LIMIT_MIB = 1024.0


def require_memory(what: str, elements: int, bytes_each: int, limit_mib: float, instead: str) -> None:
    """Refuse what does not fit.

    Args:
        what: The content of the memory, in words.
        elements: Numbers to store.
        bytes_each: Bytes of one.
        limit_mib: Limit in MiB.
        instead: Families that fit.

    Raises:
        PosteriorError: If it is more than the limit.
    """
    size = elements * bytes_each
    if size > limit_mib * 2**20:
        raise PosteriorError(
            f"{what} would take {in_words(size)}, more than limit_mib={limit_mib:g}. Use {instead}, or raise limit_mib."
        )


def in_words(size: float) -> str:
    """Bytes as text.

    Args:
        size: Number of bytes.

    Returns:
        One decimal and a unit.

    Example:
        >>> in_words(1536), in_words(3 * 2**40)
        ('1.5 KiB', '3.0 TiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
