"""Defects found in ivon-opt 0.1.3, a widely used variational optimizer, each as a test that passes here.

The contracts of all optimizers (tests/contracts) and tests of callbacks hold what fails there in one process:

- a resumed run continues bit by bit (there the step counter is not in the state: the first step is 9.96× too large);
- an exception inside a pass or a training step gives the mean back (there: no try/finally);
- parameters without a gradient are no obstacle, and `step` takes an ordinary closure (there: both raise);
- Lightning's automatic optimization trains (there: the first step crashes);
- clipping after the pass shortens the step (there: gradients are captured too early);
- all tensors lie in the state, which Lightning moves to the device (there: in ``param_groups``).

The rest is here; each docstring names the defect as it was checked there.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from distributed import run_on_ranks
from oracles import one_example_at_a_time, relative_error
from tiny_training import Classifier, assert_same_bits, blobs, mlp, quiet_trainer, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_bayes import VOGN, VOGNCallback
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim.groups import state_of
from lightning_bayes.strategies import all_reduce_mean_

BATCHES = [list(range(8 * i, 8 * i + 8)) for i in range(6)]


def batch(i=0):
    x, y = blobs().tensors
    return x[BATCHES[i]], y[BATCHES[i]]


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


def test_a_grad_scaler_changes_neither_gradient_nor_curvature():
    """There: gradients are captured while they still carry the scaler's factor."""
    results = []
    for scale in (None, 2.0**12):
        model = mlp()
        opt = optimizer(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for i in range(3):
            x, y = batch(i)
            with opt.sampled_params(loss_scale=scaler.get_scale()):
                scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(opt)
            scaler.update()
        results.append({**weights(model), **tensors_of(opt)})
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-5, atol=1e-8)


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


def half(rank):
    return slice(4 * rank, 4 * rank + 4)


class OnHalves(Classifier):
    """The ranks see different halves of each batch; the module keeps the weights that each of its passes saw."""

    def train_dataloader(self):
        return DataLoader(blobs(), batch_sampler=[rows[half(self.trainer.global_rank)] for rows in BATCHES])

    def training_step(self, batch, batch_idx):
        self.sampled = weights(self.net)
        return super().training_step(batch, batch_idx)


def fit_on_halves(**options):
    """Lightning's ordinary strategy="ddp" and the callback, nothing else."""
    module, betas = OnHalves(), options.pop("betas", (0.9, 0.99))
    callback = VOGNCallback(lr=0.02, num_data=48, init_precision=100.0, betas=betas)
    ddp = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    quiet_trainer(callback, **ddp, **options).fit(module)
    return {"sampled": module.sampled, "mean": weights(module), "state": tensors_of(callback.optimizer)}


def loop_by_hand(rank):
    """A DDP loop without Lightning, with noise of the rank's own."""
    model = mlp()
    wrapped, opt = DistributedDataParallel(model), optimizer(model)
    for i in range(6):
        x, y = batch(i)
        with wrapped.no_sync(), opt.sampled_params(rank):
            F.cross_entropy(wrapped(x[half(rank)]), y[half(rank)]).backward()
        all_reduce_mean_(*opt.measured())
        opt.step()
    return {"mean": weights(model), "state": tensors_of(opt)}


def loop_that_forgets_to_reduce(rank):
    """Plain DDP averages gradients only; what a naive loop would silently get wrong is refused."""
    model = mlp()
    opt, (x, y) = optimizer(model), batch(0)
    with opt.sampled_params(rank):
        F.cross_entropy(model(x[half(rank)]), y[half(rank)]).backward()
    with pytest.raises(UnsupportedTrainingError) as refused:
        opt.step()
    return str(refused.value)


def on_rank(rank):
    return {
        "forgot": loop_that_forgets_to_reduce(rank),
        "long": fit_on_halves(max_epochs=3),
        "one update": fit_on_halves(limit_train_batches=1, betas=(0.0, 0.0)),
        "by hand": loop_by_hand(rank),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(on_rank, 2, tmp_path_factory.mktemp("peers"))


@pytest.mark.ddp
def test_squared_gradients_are_measured_and_synchronised_under_ddp(ranks):
    """There: ``hess_approx='gradsq', sync=True`` dies in ``all_reduce(None)``."""
    for rank in ranks:
        states = rank["long"]["state"]
        assert all(states[name].min() > 0 for name in states if name.endswith("/curvature"))
        assert {int(states[name]) for name in states if name.endswith("/step")} == {18}


@pytest.mark.ddp
def test_loop_that_forgets_to_reduce_is_refused(ranks):
    """There: standard DDP with a seed per rank silently diverges."""
    for rank in ranks:
        assert "2 processes train together, but their measurements have not been averaged" in rank["forgot"]


@pytest.mark.ddp
@pytest.mark.parametrize("run", ["long", "by hand"])
def test_ranks_stay_identical_under_different_noise(ranks, run):
    """There: with a seed per rank the parameters silently diverge; with one seed all ranks draw the same noise."""
    for part in ("mean", "state"):
        assert_same_bits(ranks[1][run][part], ranks[0][run][part])
    sampled = [rank["long"]["sampled"] for rank in ranks]
    assert all((sampled[0][name] - sampled[1][name]).abs().max() > 1e-3 for name in sampled[0])


@pytest.mark.ddp
def test_the_right_recipe_is_automatic_and_the_curvature_has_its_size(ranks):
    """There: it takes sync=True, no_sync() and a seed per rank by hand; without no_sync() the curvature is 1/world_size.

    With β₂ = 0, s is the mean over all examples of the squared gradients, each at its own rank's sample.
    """
    expected: dict[str, torch.Tensor] = {}
    for number, rank in enumerate(ranks):
        model = mlp()
        model.load_state_dict(rank["one update"]["sampled"])
        examples = [(x[None], y[None]) for x, y in zip(*(t[half(number)] for t in batch(0)), strict=True)]
        _, squares = one_example_at_a_time(model, examples, lambda m, e: F.cross_entropy(m(e[0]), e[1]))
        expected = {name: expected.get(name, 0) + square / 2 for name, square in squares.items()}
    states = ranks[0]["one update"]["state"]
    found = {name: states[f"{i}/curvature"] for i, name in enumerate(expected)}
    assert relative_error(found, expected) < 1e-5
