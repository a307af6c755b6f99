"""Models with a chain of linear layers, as the block-tridiagonal posterior needs."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from lightning_bayes.errors import PosteriorError
from lightning_bayes.posteriors.memory import DEFAULT_LIMIT_MIB, require_memory
from lightning_bayes.private_torch import own_parameters


def linear_chain(model: nn.Module, limit_mib: float = DEFAULT_LIMIT_MIB) -> list[str]:
    """The names of a model's linear layers from input to output.

    Layers are taken in the order in which the model registers them, which must be the order of its forward pass.

    Args:
        model: Its parameters must all belong to `torch.nn.Linear` layers, each feeding the next.
        limit_mib: Memory in MiB that the factors may take.

    Returns:
        The layers' names.

    Raises:
        PosteriorError: Listing the layers that do not fit, or saying how much memory the factors would take.

    Example:
        >>> linear_chain(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))
        ['0', '2']
    """
    layers = [(name, m) for name, m in model.named_modules() if own_parameters(m)]
    linear = [(name, m) for name, m in layers if type(m) is nn.Linear]
    others = [f"{name or 'the model itself'} ({type(m).__name__})" for name, m in layers if type(m) is not nn.Linear]
    others += [
        f"{after} ({b.in_features} inputs after the {a.out_features} outputs of {before})"
        for (before, a), (after, b) in pairwise(linear)
        if a.out_features != b.in_features
    ]
    if others or not linear:
        raise PosteriorError(
            f"A block-tridiagonal posterior needs a chain of nn.Linear layers, but {type(model).__name__} has "
            f"{', '.join(others) or 'none'}. Use MatrixGaussian for it."
        )
    _require_chain_memory(linear, limit_mib)
    return [name for name, _ in linear]


def _require_chain_memory(linear: list[tuple[str, nn.Linear]], limit_mib: float) -> None:
    sides = [(m.out_features, m.in_features + (m.bias is not None)) for _, m in linear]
    own = sum(rows**2 + columns**2 for rows, columns in sides)
    between = sum(a[0] * b[0] + a[1] * b[1] for a, b in pairwise(sides))
    what = f"The factors of {len(sides)} linear layers and of the pairs of neighbours"
    instead = "MeanField or smaller layers"
    require_memory(what, own + between, linear[0][1].weight.element_size(), limit_mib, instead)
