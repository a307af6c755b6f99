"""Parameters that `torch.distributed.fsdp.fully_shard` (FSDP2) spreads over processes, in rows of dimension 0.

A pass of a mean-gradient method needs three things of a parameter: noise, a gradient and an elementwise update. Each process
does this for its own rows:

    noise      the rows' part of the noise that one process draws for the whole parameter
    forward    FSDP2 gathers the processes' samples, layer by layer
    gradient   FSDP2 averages it over processes and leaves each its rows, so ĝ is that of the batch over all processes
    update     elementwise

so all processes together take the update of one process with the whole batch. FSDP2 averages processes alike, so they need
equally many examples. Quantities of whole tensors, such as the root mean square that bounds a step, need all rows; steps and
noise with such quantities are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bayes.curvature.spread import Rows, is_spread, local, put_rows_, whole
from lightning_bayes.errors import UnsupportedTrainingError, name_some


def local_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter's part that this process holds."""
    return {name: local(value) for name, value in state.items()}


def local_parts(
    params: Sequence[nn.Parameter], states: Sequence[Mapping[str, Any]]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """The parts of a cohort's parameters and of their states that this process holds; all are spread, or none is."""
    if not is_spread(params[0]):
        return params, states
    return [local(param) for param in params], [local_state(state) for state in states]


def require_rows(model: nn.Module) -> bool:
    """Require trained parameters that are all whole, or all spread over all processes in rows.

    Args:
        model: The model.

    Returns:
        Whether they are spread.

    Raises:
        UnsupportedTrainingError: Naming others.
    """
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if not any(is_spread(param) for _, param in named):
        return False
    others = [name for name, param in named if not _is_in_rows(param)]
    if others:
        raise UnsupportedTrainingError(
            f"These parameters are not spread over all {dist.get_world_size()} processes in rows, as others of the model "
            f"are: {name_some(others)}. Call fully_shard on the whole model with one mesh of one dimension, without "
            "shard_placement_fn and ignored_params, or freeze them with requires_grad_(False)."
        )
    return True


def _is_in_rows(param: Any) -> bool:
    return (
        is_spread(param)
        and param.device_mesh.size() == dist.get_world_size()
        and [placement.is_shard(0) for placement in param.placements] == [True]
    )


def values_of(params: Iterable[nn.Parameter], *, spread: bool) -> dict[nn.Parameter, Tensor]:
    """The values of parameters, to be put back by `put_`; of spread ones copies of this process's parts."""
    return {param: local(param).detach().clone() if spread else param.data for param in params}


@torch.no_grad()
def put_(model: nn.Module, values: Mapping[nn.Parameter, Tensor], *, spread: bool) -> None:
    """Let parameters hold other values, spread ones in place."""
    if spread:
        put_rows_(model, list(values.items()))
        return
    for param, value in values.items():
        param.data = value  # a copy would read and write every weight twice more


def require_equally_many(num_examples: int, device: torch.device) -> None:
    """Require as many examples in this pass of every process.

    Args:
        num_examples: Those of this process.
        device: Where processes exchange numbers.

    Raises:
        UnsupportedTrainingError: If processes have different numbers.
    """
    fewest, most = _least(num_examples, device), -_least(-num_examples, device)
    if fewest != most:
        raise UnsupportedTrainingError(
            f"{fewest:g} examples in the pass of one process and {most:g} in that of another: FSDP2 averages gradients as "
            "if all had equally many. Give each the same: a DistributedSampler, and drop_last=True in the loader."
        )


def are_all_finite(is_finite: bool, device: torch.device) -> bool:
    """Whether the measurement of every process is finite, the same answer in all; arguments as in `require_equally_many`."""
    return bool(_least(is_finite, device))


def _least(number: float, device: torch.device) -> float:
    least = torch.tensor(float(number), dtype=torch.float64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return float(least)


def require_elementwise(group: Mapping[str, Any]) -> None:
    """Require a step and noise that no quantity of a whole tensor bounds.

    Args:
        group: A parameter group of spread parameters.

    Raises:
        UnsupportedTrainingError: Naming what needs whole tensors.
    """
    rule, noise = group["step_rule"], group["relative_noise"]
    if rule != "natural" or noise is not None:
        what = f"relative_noise={noise}" if rule == "natural" else f"The step {rule!r}"
        raise UnsupportedTrainingError(
            f"{what} needs the size of whole tensors, and FSDP2 spreads the parameters over processes. Pass lr=... for the "
            "algorithm's own step, without relative_noise."
        )


def whole_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a whole parameter; all processes have to call this together."""
    return {name: whole(value) for name, value in state.items()}


def slices_of(rows: Sequence[Rows]) -> tuple[int, Iterator[tuple[int, int]]]:
    """Tensors joined one after the other: their number of elements, and what of it this process holds."""
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + row.size)
    return starts[-1], ((first + row.start, first + row.stop) for first, row in zip(starts, rows, strict=False))
