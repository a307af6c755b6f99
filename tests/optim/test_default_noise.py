"""Plain PyTorch with a base optimizer chooses the noise that the callback chooses."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from tiny_training import Classifier, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import IVONCallback, NoisyKFACCallback, VOGNCallback

SIZE, BATCH = 40, 10
BODIES = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 4)),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 4)),
    "normalised": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(48, 4)
    ),
    "deep": lambda: nn.Sequential(nn.Flatten(), *(nn.Linear(16, 16) for _ in range(7)), nn.Linear(16, 4)),
}
LOSSES = {
    "classes": F.cross_entropy,
    "numbers": lambda output, y: F.mse_loss(output[:, 0], y.float()),
}


class Task(Classifier):
    def __init__(self, body, loss):
        torch.manual_seed(0)
        super().__init__(lambda m: torch.optim.Adam(m.parameters(), lr=1e-3), BODIES[body](), LOSSES[loss])


def data():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(SIZE, 1, 4, 4, generator=generator), torch.randint(4, (SIZE,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


def of_callback(callback, task):
    quiet_trainer(callback, max_epochs=3).fit(task, data())
    return callback.optimizer


def of_plain(method, task, **arguments):
    """The same updates by hand."""
    opt = method(task, base=task.configure_optimizers(), num_data=SIZE, **arguments)
    for _ in range(3):
        train(opt, task)
    return opt


def train(opt, task):
    for index, batch in enumerate(data()):
        opt.zero_grad()
        with opt.sampled_params(0):
            task.training_step(batch, index).backward()
        opt.step()


def noise(opt):
    return [(group["posterior"]["relative_noise"], group["posterior"]["noise_flatness"]) for group in opt.param_groups]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("body", BODIES)
def test_noise_and_weights_are_those_of_the_callback(body, loss):
    theirs, ours = Task(body, loss), Task(body, loss)
    expected = of_callback(VOGNCallback(), theirs)
    found = of_plain(type(expected), ours)
    assert noise(found) == noise(expected)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("callback", [IVONCallback, NoisyKFACCallback])
def test_other_methods_choose_it_too(callback):
    expected = of_callback(callback(), Task("convolutions", "classes"))
    assert noise(of_plain(type(expected), Task("convolutions", "classes"))) == noise(expected) == [(0.3, 1.0)]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"relative_noise": 0.2}, (0.2, None)),
        ({"relative_noise": None}, (None, None)),
        ({"noise_flatness": 0.5}, (0.07, 0.5)),
    ],
)
def test_what_is_stated_stays(stated, expected):
    opt = of_plain(VOGNCallback().optimizer_class, Task("linear", "classes"), **stated)
    assert noise(opt) == [expected]


def test_a_restored_state_keeps_the_choice():
    task = Task("convolutions", "classes")
    opt = of_plain(VOGNCallback().optimizer_class, task)
    other = Task("convolutions", "classes")
    other.load_state_dict(task.state_dict())
    resumed = type(opt)(other, base=other.configure_optimizers(), num_data=SIZE)
    resumed.load_state_dict(deepcopy(opt.state_dict()))
    for each, module in ((opt, task), (resumed, other)):
        train(each, module)
    assert noise(resumed) == noise(opt) == [(0.3, 1.0)]
    assert all(torch.equal(a, b) for a, b in zip(task.parameters(), other.parameters(), strict=True))
