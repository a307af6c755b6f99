"""Parameters sharded by `torch.distributed.fsdp.fully_shard` (FSDP2), in rows of dimension 0.

A mean-gradient method needs noise, a gradient and an elementwise update for each parameter. Each process handles its rows:

    noise      the process's rows of the noise that a single process would draw for the whole parameter
    forward    FSDP2 gathers the samples, layer by layer
    gradient   FSDP2 averages it over processes and scatters the rows, so ĝ is the gradient over all batches
    update     elementwise

Together the processes make the same update as a single process on the whole batch. FSDP2 weights all processes equally,
so they need equal numbers of examples. Quantities of whole tensors, such as the root mean square that bounds a step, need
all rows; steps and noise that depend on them are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_bayes.curvature.sharding import Rows, is_sharded, local, whole
from lightning_bayes.errors import UnsupportedTrainingError, name_some


def local_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of a parameter's state that this process holds."""
    return {name: local(value) for name, value in state.items()}


def require_rows(model: nn.Module) -> bool:
    """Require that the trained parameters are all whole, or all sharded over all processes in rows.

    Args:
        model: The model.

    Returns:
        Whether they are sharded.

    Raises:
        UnsupportedTrainingError: If only some are sharded in this way; the message names the others.
    """
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if not any(is_sharded(param) for _, param in named):
        return False
    others = [name for name, param in named if not _is_in_rows(param)]
    if others:
        raise UnsupportedTrainingError(
            f"These parameters are not sharded over all {dist.get_world_size()} processes in rows, unlike other parameters "
            f"of the model: {name_some(others)}. Call fully_shard on the whole model with one mesh of one dimension, "
            "without shard_placement_fn and ignored_params, or freeze them with requires_grad_(False)."
        )
    return True


def _is_in_rows(param: Any) -> bool:
    return (
        is_sharded(param)
        and param.device_mesh.size() == dist.get_world_size()
        and [placement.is_shard(0) for placement in param.placements] == [True]
    )


def require_equally_many(num_examples: int, device: torch.device) -> None:
    """Require equal numbers of examples in this pass in all processes.

    Args:
        num_examples: Number of examples in this process.
        device: Device for the communication.

    Raises:
        UnsupportedTrainingError: If the numbers differ.
    """
    fewest, most = _global_min(num_examples, device), -_global_min(-num_examples, device)
    if fewest != most:
        raise UnsupportedTrainingError(
            f"One process has {fewest:g} examples in this pass and another has {most:g}, but FSDP2 averages gradients with "
            "equal weights. Give every process the same number: use a DistributedSampler, and drop_last=True in the loader."
        )


def are_all_finite(is_finite: bool, device: torch.device) -> bool:
    """Whether the measurements of all processes are finite; all processes get the same answer."""
    return bool(_global_min(is_finite, device))


def _global_min(number: float, device: torch.device) -> float:
    """The minimum over all processes."""
    minimum = torch.tensor(float(number), dtype=torch.float64, device=device)
    dist.all_reduce(minimum, dist.ReduceOp.MIN)
    return float(minimum)


def require_elementwise(group: Mapping[str, Any]) -> None:
    """Require a step and noise that work elementwise.

    Args:
        group: A parameter group with sharded parameters.

    Raises:
        UnsupportedTrainingError: If the step or the noise depends on the size of whole tensors.
    """
    rule, noise = group["step_rule"], group["relative_noise"]
    if rule != "natural" or noise is not None:
        what = f"relative_noise={noise}" if rule == "natural" else f"The step {rule!r}"
        raise UnsupportedTrainingError(
            f"{what} needs the size of whole tensors, but FSDP2 shards the parameters. Pass lr=... for the algorithm's own "
            "step, without relative_noise."
        )


def whole_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a whole parameter. All processes must call this together."""
    return {name: whole(value) for name, value in state.items()}


def slices_of(rows: Sequence[Rows]) -> tuple[int, Iterator[tuple[int, int]]]:
    """Number of elements of concatenated tensors, and the slices (start, stop) of them that this process holds."""
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + row.size)
    return starts[-1], ((first + row.start, first + row.stop) for first, row in zip(starts, rows, strict=False))
