"""Acquisition functions: choose which unlabelled rows to label next, from predictions under S posterior samples.

    variance      Var_s[f_s(x)]                                       regression
    entropy       H[p̄(y | x)]                                         total uncertainty
    BALD          I(y; θ | x) = H[p̄] - E_s H[p_s]                     Houlsby et al. 2011, https://arxiv.org/abs/1112.5745
    BatchBALD     argmax I(y_1 … y_b; θ | x_1 … x_b), greedily        Kirsch et al. 2019, https://arxiv.org/abs/1906.08158
    power-BALD    rows drawn with probability ∝ I(y; θ | x)^β         Kirsch et al. 2023, https://arxiv.org/abs/2106.12059

Scores map predictions ``[S, B, …]`` to one value per row, ``[B]``. Selections return row indices in the pool, ``[size]``,
the first choice first. All information is in nats.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_bayes.errors import DataError, HyperparameterError, ShapeError
from lightning_bayes.predictive.decomposition import entropy, mutual_information

CONFIGURATIONS = 10_000  # label configurations that BatchBALD enumerates; if there are more, it draws this many
PRODUCT_ELEMENTS = 2**24  # largest tensor that BatchBALD forms: 128 MiB of float64


def variance_score(samples: Tensor) -> Tensor:
    """Predictive variance of a regression, summed over outputs: the score of Zhang et al. 2018, section 5.4.

    Args:
        samples: Outputs under each posterior sample, ``[S, B, …]``.

    Returns:
        ``[B]``, in squared units of the target.

    Raises:
        ShapeError: If `samples` has fewer than two dimensions.

    Example:
        >>> variance_score(torch.tensor([[[1.0], [5.0]], [[3.0], [5.0]]]))
        tensor([1., 0.])
    """
    if samples.dim() < 2:
        raise ShapeError(f"The samples have shape {tuple(samples.shape)}; expected [samples, rows, …].")
    _check_rows(samples.shape[1])
    return samples.var(0, correction=0).reshape(samples.shape[1], -1).sum(1)


def predictive_entropy(sample_probs: Tensor) -> Tensor:
    """Entropy of the prediction averaged over posterior samples: the total uncertainty, in nats.

    Args:
        sample_probs: Probabilities under each posterior sample, ``[S, B, C]``.

    Returns:
        ``[B]``, between 0 and log C.

    Example:
        >>> predictive_entropy(torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]))
        tensor([0.6931])
    """
    _check_classes(sample_probs)
    return entropy(sample_probs.mean(0))


def bald(sample_probs: Tensor) -> Tensor:
    """Mutual information between a row's label and the weights, in nats.

    Args:
        sample_probs: Probabilities under each posterior sample, ``[S, B, C]``.

    Returns:
        ``[B]``, between 0 and min(log C, log S).

    Example:
        >>> bald(torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]]))
        tensor([0.6931, 0.0000])
    """
    _check_classes(sample_probs)
    return mutual_information(sample_probs)


def top_rows(scores: Tensor, size: int) -> Tensor:
    """Select the rows with the largest scores.

    Args:
        scores: One score per row of the pool, ``[B]``.
        size: Number of rows, from 1 to B.

    Returns:
        Row indices, ``[size]``, the largest score first.

    Example:
        >>> top_rows(torch.tensor([0.1, 0.7, 0.3]), size=2)
        tensor([1, 2])
    """
    _check_size(size, len(scores))
    return scores.topk(size).indices


def power_rows(scores: Tensor, size: int, *, power: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Draw rows without replacement, with probability proportional to score^β.

    Rows similar to the best row have similar scores, so the rows with the largest scores are redundant. Random draws are
    more diverse.

    Args:
        scores: One score per row of the pool, ``[B]``, at least 0.
        size: Number of rows, from 1 to B.
        power: β. 0 draws uniformly; `top_rows` is the limit β → ∞.
        generator: Random number generator; the global one by default.

    Returns:
        Row indices, ``[size]``, all different.

    Raises:
        HyperparameterError: If the power is negative.

    Example:
        >>> power_rows(torch.tensor([0.0, 0.0, 1.0]), size=1, generator=torch.Generator().manual_seed(0))
        tensor([2])
    """
    _check_size(size, len(scores))
    if not 0 <= power < math.inf:
        raise HyperparameterError(f"power={power} must be finite and at least 0; 1 draws in proportion to the scores.")
    # The largest log-weights with Gumbel noise are a draw without replacement; -log of an exponential is Gumbel.
    gumbel = -torch.empty_like(scores).exponential_(generator=generator).log()
    tiny = torch.finfo(scores.dtype).tiny
    return top_rows(power * scores.clamp_min(tiny).log() + gumbel, size)


def power_bald(
    sample_probs: Tensor, size: int, *, power: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Draw rows without replacement, with probability proportional to BALD^β; see `bald` and `power_rows`."""
    return power_rows(bald(sample_probs), size, power=power, generator=generator)


def joint_information(sample_probs: Tensor) -> Tensor:
    """I(y_1 … y_b; θ), the mutual information between all rows' labels and the weights, by enumeration of C^b labels.

    Args:
        sample_probs: Probabilities under each posterior sample, ``[S, b, C]``.

    Returns:
        A scalar in nats, at most log S.

    Raises:
        HyperparameterError: If there are more than 10 000 label configurations.

    Example:
        >>> joint_information(torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]]))  # the second is redundant
        tensor(0.6931)
    """
    _check_classes(sample_probs)
    rows, classes = sample_probs.shape[1:]
    if classes**rows > CONFIGURATIONS:
        raise HyperparameterError(
            f"{rows} rows of {classes} classes have {classes}^{rows} label configurations, more than {CONFIGURATIONS}. "
            "Pass fewer rows, or use batch_bald, which draws configurations instead."
        )
    probs = sample_probs.double()
    information = entropy(_enumerated(probs).mean(0)) - entropy(probs).mean(0).sum()
    return information.clamp_min(0).to(sample_probs.dtype)


@torch.no_grad()
def batch_bald(
    sample_probs: Tensor,
    size: int,
    *,
    configurations: int = CONFIGURATIONS,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Greedily choose the rows whose labels have the largest joint mutual information with the weights.

    I(y_1 … y_b; θ) is submodular, so the greedy batch has at least 1 - 1/e of the information of the best batch. The
    entropy of the chosen labels is exact up to `configurations` configurations, and otherwise estimated from as many draws.

    Args:
        sample_probs: Probabilities under each posterior sample, ``[S, B, C]``.
        size: b, from 1 to B.
        configurations: Largest number of label configurations to enumerate, and the number to draw if there are more.
        generator: Random number generator on the CPU; the global one by default.

    Returns:
        Row indices, ``[size]``, all different, in the order of selection.

    Example:
        >>> coin, copy, other = torch.eye(2)[[0, 0, 1, 1]], torch.eye(2)[[0, 0, 1, 1]], torch.eye(2)[[0, 1, 0, 1]]
        >>> batch_bald(torch.stack([coin, copy, other], 1), size=2)  # top_rows cannot distinguish copy and other
        tensor([0, 2])
    """
    _check_classes(sample_probs)
    _check_size(size, sample_probs.shape[1])
    probs = sample_probs.double()
    conditional = entropy(probs).mean(0)
    chosen: list[int] = []
    for _ in range(size):
        joint, weight = _label_configurations(probs[:, chosen], configurations, generator)
        gains = _joint_entropies(joint, weight, probs) - conditional
        gains[chosen] = -math.inf
        chosen.append(int(gains.argmax()))
    return torch.tensor(chosen, device=sample_probs.device)


def _label_configurations(
    probs: Tensor, configurations: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """p(y_1 … y_n | θ_s) of K label configurations of the chosen rows, ``[S, K]``, and their weights in a sum, ``[K]``."""
    rows, classes = probs.shape[1:]
    if classes**rows <= configurations:
        joint = _enumerated(probs)
        return joint, torch.ones_like(joint[0])
    joint = _drawn(probs, configurations, generator)
    return joint, 1 / (configurations * joint.mean(0))  # importance weights: 1 / (K p(y_1 … y_n))


def _enumerated(probs: Tensor) -> Tensor:
    """p(y_1 … y_n | θ_s) of all C^n configurations, ``[S, C^n]``."""
    joint = probs.new_ones(len(probs), 1)
    for row in probs.unbind(1):
        joint = (joint[:, :, None] * row[:, None, :]).flatten(1)
    return joint


def _drawn(probs: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """p(y_1 … y_n | θ_s) of configurations drawn from their mixture over samples, ``[S, count]``."""
    samples = len(probs)
    source = torch.randint(samples, (count,), generator=generator)
    joint = probs.new_ones(samples, count)
    for row in probs.unbind(1):
        labels = torch.multinomial(row.cpu()[source], 1, generator=generator)[:, 0]
        joint = joint * row[:, labels.to(row.device)]
    return joint


def _joint_entropies(joint: Tensor, weight: Tensor, probs: Tensor) -> Tensor:
    """H[y_1 … y_n, y] for the label y of each row of the pool, ``[B]``, as a weighted sum over configurations."""
    samples, configurations = joint.shape
    rows_per_chunk = max(1, PRODUCT_ELEMENTS // (configurations * probs.shape[2]))
    entropies = []
    for chunk in torch.split(probs, rows_per_chunk, 1):
        extended = torch.einsum("sk,sbc->kbc", joint, chunk) / samples
        entropies.append(torch.einsum("k,kbc->b", weight, torch.special.entr(extended)))
    return torch.cat(entropies)


def _check_rows(rows: int) -> None:
    if rows == 0:
        raise DataError("The pool is empty: there are no rows left to label. Stop, or add unlabelled rows.")


def _check_classes(sample_probs: Tensor) -> None:
    if sample_probs.dim() != 3:
        raise ShapeError(f"sample_probs has shape {tuple(sample_probs.shape)}; expected [samples, rows, classes].")
    _check_rows(sample_probs.shape[1])
    if sample_probs.shape[2] < 2:
        raise DataError(
            "The predictions have one class, so labels carry no information. Pass probabilities of at least two classes; "
            "for one sigmoid output, stack p and 1 - p."
        )


def _check_size(size: int, rows: int) -> None:
    _check_rows(rows)
    if not 1 <= size <= rows:
        raise HyperparameterError(f"Cannot choose size={size} rows from a pool of {rows}. Choose 1 to {rows}.")
