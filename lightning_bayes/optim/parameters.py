"""Which parameters of a model are trained, which have a posterior, and their states before the first update."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_bayes.curvature.parameters import rows_without_gradient
from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError, UnsupportedTrainingError
from lightning_bayes.optim.weight_prior import prior_state, weight_priors
from lightning_bayes.posteriors import AbstractPosterior, root_mean_squares
from lightning_bayes.private_torch import NormBase


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require gradients."""
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise HyperparameterError(
            f"{type(model).__name__} has no trainable parameter. Call requires_grad_(True) on the parameters to train."
        )
    return params


def names_of(model: nn.Module, params: Sequence[nn.Parameter]) -> list[str]:
    """The names of trained parameters, which a step may not replace by others."""
    names = {param: name for name, param in model.named_parameters()}
    for param in params:
        if param not in names:
            raise UnsupportedTrainingError(
                f"A trained parameter of shape {list(param.shape)} is no longer part of {type(model).__name__}: its layer "
                "was replaced after configure_optimizers. Change the layer's values, as load_state_dict does, or leave its "
                "parameters out of the optimizer."
            )
    return [names[param] for param in params]


def stored_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Names that ``torch.nn.utils.prune`` does not change: it adds a mask, and the suffix ``_orig`` to the weight's name."""
    masks = {name.removesuffix("_mask") for name, _ in model.named_buffers() if name.endswith("_mask")}
    names = {param: name for name, param in model.named_parameters()}
    return {
        param: name.removesuffix("_orig") if name.removesuffix("_orig") in masks else name
        for param, name in names.items()
    }


def require_initialised(model: nn.Module) -> None:
    """Require that lazy layers are initialised."""
    lazy = [name for name, param in model.named_parameters() if is_lazy(param)]
    if lazy:
        raise UnsupportedLayerError(
            f"{', '.join(lazy)} have no size yet. Call the model once with a batch before building the optimizer."
        )


def reference_weights(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """The tensor whose size a parameter uses instead of its own."""
    layers = (dict(module.named_parameters(recurse=False)) for module in model.modules())
    return {
        param: params["weight"]
        for params in layers
        for name, param in params.items()
        if "weight" in params and param is not params["weight"]
    }


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def _norm_params(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of normalisation layers; empty if all trainable parameters belong to such layers."""
    params = {param for module in model.modules() if _normalises(module) for param in module.parameters()}
    trained = {param for param in model.parameters() if param.requires_grad}
    return params if trained - params else set()


def has_norms(model: nn.Module) -> bool:
    """Whether a network has normalisation layers."""
    return any(map(_normalises, model.modules()))


def _normalises(module: nn.Module) -> bool:
    """Whether a layer is torch's normalisation, or another layer of vectors whose outputs ignore the scale of its inputs."""
    if isinstance(module, _NORMS):
        return True
    own = list(module.parameters(recurse=False))
    size = max((param.numel() for param in own), default=0)
    is_candidate = size > 1 and all(param.numel() == max(param.shape, default=1) for param in own)
    if not is_candidate or len(own) < len(list(module.parameters())):
        return False
    return any(_ignores_scale(module, shape) for shape in ((2, 3, size), (2, size, 3, 3), (2, size, 3)))


def _ignores_scale(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether outputs of a copy with weights of one depend on random inputs, and not on their scale."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            layer = copy.deepcopy(module).float().cpu()
            for param in layer.parameters():
                param.fill_(1)
            inputs = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
            one, other, larger = (layer.forward(x) for x in (*inputs, 8 * inputs[0]))
            return torch.allclose(one, larger, atol=1e-3) and not torch.allclose(one, other, atol=1e-1)
    except Exception:  # of a user's layer, for inputs of another shape
        return False


def has_convolutions(model: nn.Module) -> bool:
    """Whether a network has convolutions."""
    return any(isinstance(module, _CONVOLUTIONS) for module in model.modules())


def require_pattern(bayesian: str | None) -> None:
    """Raise `HyperparameterError` unless ``bayesian`` is a regular expression or None."""
    try:
        re.compile(bayesian or "")
    except (re.error, TypeError) as error:
        raise HyperparameterError(
            f"bayesian={bayesian!r} is not a regular expression: {error}. Pass one for names of parameters, such as "
            "'^head', with \\ before a literal bracket."
        ) from error


def deterministic_params(model: nn.Module, bayesian: str | None, *, norms: bool = True) -> set[nn.Parameter]:
    """The parameters without a posterior."""
    if bayesian is None:
        return set() if norms else _norm_params(model)
    require_pattern(bayesian)
    named = dict(model.named_parameters())  # frozen ones too, which may be unfrozen later
    unmatched = {param for name, param in named.items() if not re.search(bayesian, name)}
    trained = [name for name, param in named.items() if param.requires_grad]
    if all(named[name] in unmatched for name in trained):
        names = ", ".join(trained)
        raise HyperparameterError(f"bayesian={bayesian!r} matches none of the trainable parameters {names}.")
    return unmatched


@final
class StartingStates:
    """Starts the states of a model's parameters; `norms` says whether normalisation layers have a posterior."""

    def __init__(self, model: nn.Module, *, bayesian: str | None, prior: AbstractPosterior | None, norms: bool) -> None:
        require_initialised(model)
        self.deterministic = deterministic_params(model, bayesian, norms=norms)
        self.weight_priors = weight_priors(model, prior)
        self._reference, self._rows = reference_weights(model), rows_without_gradient(model)

    def new(self, param: nn.Parameter, group: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
        """The state of a parameter; `fields` name the tensors that are shaped like it, which start at zero."""
        size = root_mean_squares([self._reference.get(param, param).detach()])[0]
        state: dict[str, Any] = {
            "step": 0,
            "noisy": param not in self.deterministic,
            "initial_rms": torch.where(size > 0, size, torch.ones_like(size)),
        }
        state |= {name: torch.zeros_like(param, memory_format=torch.preserve_format) for name in fields}
        state |= prior_state(param, group, self.weight_priors)
        if param in self._rows:
            state["rows_without_noise"] = self._rows[param].nonzero()[:, 0].tolist()
        return state
