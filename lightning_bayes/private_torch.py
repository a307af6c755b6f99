"""Every private PyTorch symbol that this package uses, with the tested PyTorch versions.

PyTorch may rename these symbols in any release. This module is the only one that uses them: it checks them on import and
wraps them in functions. A test finds private symbols elsewhere. The exception is ``torch._foreach_*``, which has no public
name and which PyTorch's own optimizers use.

Autograd nodes save different values for different operations, so a missing value is not an error; see `saved_by`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.modules import batchnorm, conv
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from lightning_bayes.errors import UnsupportedTrainingError

OLDEST_TESTED: Final = "2.5.1"
NEWEST_TESTED: Final = "2.15.0"

_ADVICE = f"Install torch {OLDEST_TESTED} to {NEWEST_TESTED} (tested)."

try:
    from torch.nn.modules import _functions
    from torch.utils import _pytree

    BatchNormBase: TypeAlias = batchnorm._BatchNorm
    NormBase: TypeAlias = batchnorm._NormBase
    ConvBase: TypeAlias = conv._ConvNd
    SYNC_BATCH_NORM: Final = _functions.SyncBatchNorm
    tree_flatten, tree_leaves, tree_unflatten = _pytree.tree_flatten, _pytree.tree_leaves, _pytree.tree_unflatten
except (ImportError, AttributeError) as error:
    raise UnsupportedTrainingError(f"PyTorch {torch.__version__} is not supported: {error}. {_ADVICE}") from error

CALL_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # of a module
BACKWARD_HOOK_KIND: Final = "_is_full_backward_hook"  # of a module; None without backward hooks
PRE_HOOKS: Final = CALL_HOOKS[0]
ATTENTION_RESET: Final = "_reset_parameters"  # of `nn.MultiheadAttention`, which has no public one
FLAT_WEIGHTS: Final = ("_flat_weights", "_flat_weight_refs")  # a recurrent layer's own lists of its parameters
ORIGINAL, MASK = PRUNED = ("_orig", "_mask")  # endings of what `torch.nn.utils.prune` computes a weight from
# Endings of the trained parameters that torch's older weight_norm, its spectral_norm and prune compute a weight from.
COMPUTED_FROM: Final = ("_v", "_g", ORIGINAL)
LAST_RATES: Final = "_last_lr"  # of a learning-rate scheduler
INNER_SCHEDULERS: Final = "_schedulers"  # of a scheduler that chains others
PACK: Final = torch._VF._pack_padded_sequence  # what `torch.nn.utils.rnn.pack_padded_sequence` calls
# The nodes whose backward runs only once, or in all processes together. Torch applies these functions where no
# `TorchFunctionMode` sees them, and a node tells its function by its name alone.
UNREPEATABLE: Final = (CheckpointFunction.__name__, SYNC_BATCH_NORM.__name__)


def _scheduler() -> ConstantLR:
    return ConstantLR(SGD([torch.zeros(1)], lr=1.0))


_ATTRIBUTES: Final[tuple[tuple[str, Any, tuple[str, ...]], ...]] = (
    (
        "torch._C",
        torch._C,
        (
            "DisableTorchFunction",
            "_DisableFuncTorch",
            "_are_functorch_transforms_active",
            "_current_graph_task_id",
            "_will_engine_execute_node",
        ),
    ),
    ("torch._VF", torch._VF, ("_pack_padded_sequence",)),
    ("torch.nn.MultiheadAttention", nn.MultiheadAttention, (ATTENTION_RESET,)),
    ("torch.nn.Module", nn.Module(), ("_parameters", "_buffers", "_modules", *CALL_HOOKS, BACKWARD_HOOK_KIND)),
    ("torch.nn.RNN", nn.RNN(1, 1, device="meta"), FLAT_WEIGHTS),  # draws no random numbers
    ("torch.nn.Conv1d", nn.Conv1d, ("_conv_forward",)),
    ("torch.optim.lr_scheduler.ConstantLR", _scheduler(), (LAST_RATES,)),
    ("torch.optim.lr_scheduler.ChainedScheduler", ChainedScheduler([_scheduler()]), (INNER_SCHEDULERS,)),
    ("torch.distributions.Distribution", Distribution, ("_validate_args",)),
    ("torch.Tensor", Tensor, ("_is_view", "_version", "_backward_hooks")),
    ("torch.autograd.graph.Node", torch.ones(2, requires_grad=True).sum().grad_fn, ("_input_metadata",)),
)


def check_private_symbols(attributes: tuple[tuple[str, Any, tuple[str, ...]], ...] = _ATTRIBUTES) -> None:
    """Raise `UnsupportedTrainingError`, listing all missing symbols; `attributes` is a table like `_ATTRIBUTES`."""
    missing = [f"{label}.{name}" for label, owner, names in attributes for name in names if not hasattr(owner, name)]
    if missing:
        raise UnsupportedTrainingError(
            f"PyTorch {torch.__version__} is not supported: {', '.join(missing)} is missing. {_ADVICE}"
        )


check_private_symbols()


# The parameters and buffers registered on a module itself, by name; changing a dictionary changes the module.
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")

is_view: Callable[[Tensor], bool] = Tensor._is_view  # for autograd
version_of: Callable[[Tensor], int] = attrgetter("_version")  # counts the changes in place
is_in_functorch: Callable[[], bool] = (
    torch._C._are_functorch_transforms_active
)  # whether a torch.func transform is active
will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node  # whether the running backward runs a node
# A context without `TorchFunctionMode`s, which slow down every access to an attribute of a tensor.
without_torch_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
# A context in which operations act beside any active torch.func transform.
outside_functorch: Callable[[], AbstractContextManager[None]] = torch._C._DisableFuncTorch


class EagerMode(TorchFunctionMode, ABC):
    """A mode in which compiled code runs eagerly, because it hides the functions that it calls."""

    _eager: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> Any:
        """See the functions that are called from now on."""
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            self._eager = torch.compiler.set_stance("force_eager")
        self._eager.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._eager.__exit__(*error)

    @abstractmethod
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""


def has_children(module: nn.Module) -> bool:
    """Whether a module has submodules."""
    return bool(module._modules)


def conv_helper(kind: type[nn.Module]) -> Any:
    """The method of a convolution class that computes the output from weight and bias."""
    return getattr(kind, "_conv_forward")  # noqa: B009  # nn.Module has no such attribute


def unvalidated(distribution: Distribution) -> Distribution:
    """The same distribution without checks of arguments and values, which refuse the bounds of a support."""
    free = copy(distribution)
    free._validate_args = False
    return free


def gradient_hooks(param: Tensor) -> dict[int, Any]:
    """The hooks on a tensor's gradient, by key."""
    return param._backward_hooks or {}


def is_in_backward() -> bool:
    """Whether a backward pass is running."""
    return bool(torch._C._current_graph_task_id() != -1)


def output_shapes(node: Any) -> list[tuple[int, ...]]:
    """Shapes of the forward outputs of an autograd node."""
    return [tuple(meta.shape) for meta in node._input_metadata]


def is_alive(node: Any) -> bool:
    """Whether a node's graph still exists. Torch 2.5 and 2.6 free it below a Python function's node and crash on use."""
    try:
        node.next_functions  # noqa: B018  # raises
    except RuntimeError:
        return False
    return True


def saved_by(node: Any, name: str, default: Any = None) -> Any:
    """The value that an autograd node saved under `name`, such as ``"dim"``; `default` if there is none."""
    return getattr(node, f"_saved_{name}", default)


def mark_as_scheduled(step: Any) -> None:
    """Keep learning-rate schedulers from wrapping an optimizer's `step`, which they do to count its calls for a warning."""
    step._wrapped_by_lr_sched = True
