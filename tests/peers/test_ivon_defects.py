"""Defects found in ivon-opt 0.1.3, a widely used variational optimizer, each as a test that passes here.

The contracts of all optimizers (tests/contracts) and the tests of callbacks hold most of what fails there:

- a resumed run continues bit by bit (there the step counter is not in the state: the first step is 9.96× too large);
- an exception inside a pass or a training step gives the mean back (there: no try/finally);
- parameters without a gradient are no obstacle, and `step` takes an ordinary closure (there: both raise);
- Lightning's automatic optimization trains (there: the first step crashes);
- clipping after the pass shortens the step (there: gradients are captured too early);
- all tensors lie in the state, which Lightning moves to the device (there: in ``param_groups``);
- a GradScaler changes neither gradient nor curvature (there: the gradients carry its factor), see test_situations.py;
- ranks stay identical under noise of their own, with the curvature of all examples, in a loop by hand and under Lightning's
  DDP (there: ranks diverge, squared gradients die in ``all_reduce(None)``, or s is 1/world_size), see callbacks/test_ddp.py.

The rest is here; each docstring names the defect as it was checked there.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from distributed import run_on_ranks
from tiny_training import assert_same_bits, blobs, mlp
from torch import nn

from lightning_bayes import VOGN
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim.groups import state_of


def batch(i):
    return tuple(tensor[8 * i : 8 * i + 8] for tensor in blobs().tensors)


def optimizer(model, **arguments):
    defaults = {"lr": 0.02, "num_data": 48, "init_precision": 100.0, "betas": (0.9, 0.99)}
    return VOGN(model, **{**defaults, **arguments})


def step(model, opt, i):
    x, y = batch(i)
    with opt.sampled_params():
        F.cross_entropy(model(x), y).backward()
    opt.step()


def tensors_of(opt):
    return {f"{i}/{k}": torch.as_tensor(v) for i, state in state_of(opt.state_dict()).items() for k, v in state.items()}


class TwoPrecisions(nn.Module):
    def __init__(self):
        super().__init__()
        self.coarse, self.fine = nn.Linear(4, 6), nn.Linear(6, 3).double()

    def forward(self, x):
        return self.fine(self.coarse(x).tanh().double())


def test_parameters_may_have_several_dtypes_and_groups(tmp_path):
    """There: one device and one dtype for all parameters, else ``_get_param_configs`` raises."""
    model = TwoPrecisions()
    groups = [{"params": list(model.coarse.parameters()), "lr": 0.01}, {"params": list(model.fine.parameters())}]
    opt = optimizer(model, params=groups)
    for i in range(3):
        step(model, opt, i)
    torch.save(opt.state_dict(), tmp_path / "state.pt")
    other = optimizer(model, params=[{"params": list(part.parameters())} for part in (model.coarse, model.fine)])
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same_bits(tensors_of(other), tensors_of(opt))
    for part, dtype in ((model.coarse, torch.float32), (model.fine, torch.float64)):
        for param in part.parameters():
            assert {param.dtype, other.state[param]["curvature"].dtype, other.state[param]["momentum"].dtype} == {dtype}
            assert other.state[param]["curvature"].min() > 0
    assert opt.posterior().sample()["fine.weight"].dtype == torch.float64


def forgets_to_reduce(rank):
    """Plain DDP averages gradients only; what a naive loop would silently get wrong is refused."""
    model = mlp()
    opt, (x, y) = optimizer(model), batch(rank)
    with opt.sampled_params(rank):
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(UnsupportedTrainingError) as refused:
        opt.step()
    return str(refused.value)


@pytest.mark.ddp
def test_loop_that_forgets_to_reduce_is_refused(tmp_path):
    """There: standard DDP with a seed per rank silently diverges."""
    for message in run_on_ranks(forgets_to_reduce, 2, tmp_path):
        assert "2 processes train together, but their measurements have not been averaged" in message
