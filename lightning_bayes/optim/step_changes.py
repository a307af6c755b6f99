"""What a step itself changes in the weights of a pass, as a norm limit or a target network does.

The weights of a pass are a sample, but what stays is the mean:

- what a step adds to a sample is added to its mean;
- a copy of a sample, in another parameter, becomes a copy of its mean.

The version counter of a parameter tells of changes in place. ``param.data`` has none. The record of a pass tells of its use,
and from then on every pass compares its samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

Values: TypeAlias = Mapping[nn.Parameter, Tensor]


@torch.no_grad()
def change_means(means: Values, ends: Values, drawn: Values) -> None:
    """Change the means as the step did, whose weights were the sample `drawn`; `ends` are the values of some at its end."""
    changed = {p: value for p, value in ends.items() if p in means and not torch.equal(value, drawn[p])}
    unchanged = {p: sample for p, sample in drawn.items() if p not in changed}
    for param, value in changed.items():
        mean, sample, of = means[param], drawn[param], _sampled_from(value, unchanged)
        moved = torch.where(value == sample, mean, value + (mean - sample))  # without noise, the value
        mean.copy_(moved if of is None else means[of])
    for param in ends.keys() - means.keys():
        if (of := _sampled_from(ends[param], {**unchanged, **changed})) is not None:
            param.data.copy_(means[of])


def _sampled_from(value: Tensor, samples: Values) -> nn.Parameter | None:
    """The parameter of which a value is the sample."""
    same_shape = ((p, sample) for p, sample in samples.items() if sample.shape == value.shape)
    return next((p for p, sample in same_shape if torch.equal(sample, value)), None)
