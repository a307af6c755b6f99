"""Every private symbol of PyTorch that this package uses, with the versions that it was tested with.

PyTorch may rename these in any release. Each stands here once and is checked on import; code elsewhere calls the functions
below. A test finds private symbols that are used outside of the tables. Excepted are the functions ``torch._foreach_*``,
which have no public name and which PyTorch's own optimizers are made of.

What autograd's nodes save (`saved_by`) differs between operations, so its absence is an answer and no error: a loss that
cannot be read for certain asks for its reduction.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR

from lightning_bayes.errors import UnsupportedTrainingError

OLDEST_TESTED: Final = "2.5.1"
NEWEST_TESTED: Final = "2.15.0"

_ADVICE = f"Install torch {OLDEST_TESTED} to {NEWEST_TESTED} (tested)."

try:
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.nn.modules.conv import _ConvNd as ConvBase
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
except ImportError as error:
    raise UnsupportedTrainingError(f"PyTorch {torch.__version__} is not supported: {error}. {_ADVICE}") from error

CALL_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # of a module
BACKWARD_HOOK_KIND: Final = "_is_full_backward_hook"  # of a module; None without backward hooks
PRE_HOOKS: Final = CALL_HOOKS[0]
FLAT_WEIGHTS: Final = (
    "_flat_weights",
    "_flat_weight_refs",
)  # lists in which a recurrent layer holds its parameters again
LAST_RATES: Final = "_last_lr"  # of a learning-rate scheduler
INNER_SCHEDULERS: Final = "_schedulers"  # of a scheduler that chains others
DDP_SINK: Final = "_DDPSink"  # operation through which DistributedDataParallel passes all outputs of a step


def _scheduler() -> ConstantLR:
    return ConstantLR(SGD([torch.zeros(1)], lr=1.0))


_ATTRIBUTES: Final[tuple[tuple[str, Any, tuple[str, ...]], ...]] = (
    (
        "torch._C",
        torch._C,
        ("_are_functorch_transforms_active", "_current_graph_task_id", "_will_engine_execute_node"),
    ),
    ("torch.nn.Module", nn.Module(), ("_parameters", "_buffers", "_modules", *CALL_HOOKS, BACKWARD_HOOK_KIND)),
    ("torch.nn.RNN", nn.RNN(1, 1), FLAT_WEIGHTS),
    ("torch.nn.Conv1d", nn.Conv1d, ("_conv_forward",)),
    ("torch.optim.lr_scheduler.ConstantLR", _scheduler(), (LAST_RATES,)),
    ("torch.optim.lr_scheduler.ChainedScheduler", ChainedScheduler([_scheduler()]), (INNER_SCHEDULERS,)),
    ("torch.Tensor", Tensor, ("_is_view", "_backward_hooks")),
    ("torch.autograd.graph.Node", torch.ones(2, requires_grad=True).sum().grad_fn, ("_input_metadata",)),
    ("torch.distributed", distributed_c10d, ("_get_default_store",) if torch.distributed.is_available() else ()),
)


def check_private_symbols(attributes: tuple[tuple[str, Any, tuple[str, ...]], ...] = _ATTRIBUTES) -> None:
    """Require private attributes to exist.

    Args:
        attributes: Name of an owner, the owner, and what it has to have.

    Raises:
        UnsupportedTrainingError: Naming those that are missing, and PyTorch's version.
    """
    missing = [f"{owner}.{name}" for owner, found, names in attributes for name in names if not hasattr(found, name)]
    if missing:
        raise UnsupportedTrainingError(
            f"PyTorch {torch.__version__} is not supported: {', '.join(missing)} is missing. {_ADVICE}"
        )


check_private_symbols()


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters that a module holds itself, by name; changing the dictionary changes the module."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers that a module holds itself, by name; changing the dictionary changes the module."""
    return module._buffers


def has_children(module: nn.Module) -> bool:
    """Whether a module has submodules."""
    return bool(module._modules)


def conv_helper(kind: type[nn.Module]) -> Any:
    """The method by which a type of convolution computes its output from weight and bias."""
    return getattr(kind, "_conv_forward")  # noqa: B009  # of every convolution, not of every module


def gradient_hooks(param: Tensor) -> dict[int, Any]:
    """Hooks on a tensor's gradient by key; empty if there are none."""
    return param._backward_hooks or {}


def is_view(tensor: Tensor) -> bool:
    """Whether autograd takes a tensor for a view."""
    return tensor._is_view()


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version


def is_in_functorch() -> bool:
    """Whether a transform of torch.func runs."""
    return bool(torch._C._are_functorch_transforms_active())


def is_in_backward() -> bool:
    """Whether autograd's engine runs."""
    return bool(torch._C._current_graph_task_id() != -1)


def will_execute(node: Any) -> bool:
    """Whether the running backward executes a node."""
    return bool(torch._C._will_engine_execute_node(node))


def output_shapes(node: Any) -> list[tuple[int, ...]]:
    """Shapes of what a node of autograd's graph computed in the forward."""
    return [tuple(meta.shape) for meta in node._input_metadata]


def is_alive(node: Any) -> bool:
    """Whether a node's graph exists. Torch 2.5 and 2.6 free it below the node of a Python function, and crash on use."""
    try:
        node.next_functions  # noqa: B018  # raises
    except RuntimeError:
        return False
    return True


def saved_by(node: Any, name: str, default: Any = None) -> Any:
    """The value that a node of autograd's graph saved as `name`, such as ``"dim"``; `default` if it saved none."""
    return getattr(node, f"_saved_{name}", default)


def mark_as_scheduled(step: Any) -> None:
    """Tell schedulers that an optimizer's `step` needs no wrapper of theirs, which counts its calls for a warning."""
    step._wrapped_by_lr_sched = True


def default_store() -> Any:
    """The key-value store of the default process group."""
    return distributed_c10d._get_default_store()


__all__ = [
    "BACKWARD_HOOK_KIND",
    "CALL_HOOKS",
    "DDP_SINK",
    "FLAT_WEIGHTS",
    "INNER_SCHEDULERS",
    "LAST_RATES",
    "PRE_HOOKS",
    "BatchNormBase",
    "ConvBase",
    "NormBase",
    "check_private_symbols",
    "conv_helper",
    "default_store",
    "gradient_hooks",
    "has_children",
    "is_alive",
    "is_in_backward",
    "is_in_functorch",
    "is_view",
    "mark_as_scheduled",
    "output_shapes",
    "own_buffers",
    "own_parameters",
    "saved_by",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
    "will_execute",
]
