"""Models with a chain of linear layers, as the block-tridiagonal posterior needs."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from lightning_bayes.errors import PosteriorError
from lightning_bayes.posteriors.memory import DEFAULT_LIMIT_MIB, require_memory
from lightning_bayes.private_torch import own_parameters


def linear_chain(model: nn.Module, limit_mib: float = DEFAULT_LIMIT_MIB) -> list[str]:
    """The names of a model's linear layers, registered in the order of the forward pass; `limit_mib` bounds the factors."""
    layers = [(name, m) for name, m in model.named_modules() if own_parameters(m)]
    linear = [(name, m) for name, m in layers if type(m) is nn.Linear]
    misfits = [f"{name or 'the model itself'} ({type(m).__name__})" for name, m in layers if type(m) is not nn.Linear]
    misfits += [
        f"{after} ({b.in_features} inputs after the {a.out_features} outputs of {before})"
        for (before, a), (after, b) in pairwise(linear)
        if a.out_features != b.in_features
    ]
    if misfits or not linear:
        raise PosteriorError(
            f"A block-tridiagonal posterior needs a chain of nn.Linear layers, but {type(model).__name__} has "
            f"{', '.join(misfits) or 'none'}. Use MatrixGaussian instead."
        )
    _require_chain_memory(linear, limit_mib)
    return [name for name, _ in linear]


def _require_chain_memory(linear: list[tuple[str, nn.Linear]], limit_mib: float) -> None:
    sides = [(m.out_features, m.in_features + (m.bias is not None)) for _, m in linear]
    layers = sum(rows**2 + columns**2 for rows, columns in sides)
    pairs = sum(a[0] * b[0] + a[1] * b[1] for a, b in pairwise(sides))
    what = f"The factors of {len(sides)} linear layers and of the pairs of neighbours"
    bytes_each = linear[0][1].weight.element_size()
    require_memory(what, layers + pairs, bytes_each, limit_mib, "MeanField or smaller layers")
