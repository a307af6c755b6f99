"""Every concrete optimizer of the package, found by its class, and a small classifier that each of them trains."""

from __future__ import annotations

import inspect
import io
import pkgutil
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lightning_bayes import optim
from lightning_bayes.likelihood import Categorical
from lightning_bayes.optim import NoisyOptimizer
from lightning_bayes.optim.diagonal.estimators import SecondOrder
from lightning_bayes.optim.diagonal.reparameterised import Reparameterised
from lightning_bayes.optim.finished_pass import FinishedPass

for module in pkgutil.walk_packages(optim.__path__, f"{optim.__name__}."):
    import_module(module.name)  # defines the subclasses, also of files that nothing else imports


def concrete(cls):
    """The package's subclasses that are not abstract; controls of benchmarks are not of the family."""
    for child in cls.__subclasses__():
        yield from concrete(child)
        if not inspect.isabstract(child) and child.__module__.startswith("lightning_bayes."):
            yield child


OPTIMIZERS = sorted(set(concrete(NoisyOptimizer)), key=lambda cls: cls.__name__)

# Constructor arguments without which an optimizer does not train a classifier. A new one needs an entry only if it does not
# train without.
NEEDS: dict[str, dict[str, Any]] = {
    "FullVON": {"lr": 0.1, "damping": 2.0, "damping_in_noise": True},  # Hessians of networks have negative eigenvalues
    "NNGFull": {
        "lr": 0.05,
        "damping": 0.1,
        "likelihood": Categorical(),
    },  # one draw of labels leaves most directions out
}
NATURAL_RATES = {"IVON": 0.5}  # of the natural step, where 0.01 does not train


def classifier(optimizer):
    """A network of two classes with a BatchNorm layer, where the optimizer takes one; modules 0 and 3 are linear."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8) if takes_batch_norm(optimizer) else nn.Identity()
    return nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(inplace=True), nn.Linear(8, 2))


def construct(optimizer, model, *groups, step_rule="natural", **arguments):
    """Build the optimizer around a model, with these arguments and, before them, what it needs."""
    given = {"num_data": 3200, **arguments, **NEEDS.get(optimizer.__name__, {})}
    if step_rule == "user":  # the noise of the bound, unless stated
        return optimizer(model, base=torch.optim.Adam(model.parameters(), lr=1e-2), **{"relative_noise": None, **given})
    rule = {"step_rule": step_rule} if len(step_rules(optimizer)) > 1 else {}
    lr = NATURAL_RATES.get(optimizer.__name__, 1e-2) if step_rule == "natural" else 1e-2
    return optimizer(model, *groups, **{"lr": lr, **rule, **given})


def weights(model):
    """A copy of all weights as one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def through_a_file(state):
    """What a checkpoint of the state reads back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def half_squares(model, x, y):
    """The loss of a linear regression with noise of variance one."""
    return 0.5 * F.mse_loss(model(x), y)


def train_on(opt, loss, steps=1):
    """Updates at one sample of the weights each."""
    for _ in range(steps):
        with opt.sampled_params():
            loss().backward()
        opt.step()


# -- capabilities, read from the class ----------------------------------------------------------------------------------


def step_rules(optimizer):
    """The step rules that an optimizer has: the natural one alone if it has no callback, and so no default step."""
    default = getattr(optimizer, "default_step", None)
    return ["natural"] + ["trust_region"] * (default is not None) + ["user"] * (default == "user")


def from_backpack(optimizer):
    """Whether BackPACK measures the curvature: it takes neither a scaled loss nor BatchNorm in training mode."""
    return isinstance(getattr(optimizer, "estimator", None), SecondOrder)


def draws_labels(optimizer):
    """Whether the curvature is measured with labels that the model draws, in each pass others."""
    return getattr(optimizer, "draws_labels", False)


def is_chain(optimizer):
    """Whether the model must be a chain of linear layers."""
    return getattr(optimizer, "needs_chain", False)


def is_reparameterised(optimizer):
    """Whether the curvature is an estimate from noise and gradient, which a pass without noise cannot give."""
    return isinstance(getattr(optimizer, "estimator", None), Reparameterised)


def reparameterised(grad, sample, mean, precision):
    """ĥ of one pass by the estimator, from a gradient at a sample."""
    param = nn.Parameter(sample.clone())
    param.grad = grad
    finished = FinishedPass(SimpleNamespace(gradient_factor=1.0), 0, 1.0, {param: mean})
    return Reparameterised().read(finished, [param], lambda ps: {p: (p.detach() - mean) * precision for p in ps})[param]


def takes_batch_norm(optimizer):
    """Whether a model may have other layers than linear ones and convolutions, such as BatchNorm."""
    return not (optimizer.joins_weights or from_backpack(optimizer))


def chooses_engine(optimizer):
    """Whether ``engine="fused"`` and ``engine="backpack"`` measure the same: BackPACK's factors have no bias column."""
    return not (optimizer.joins_weights or optimizer.estimator.quantity == "kfac")
