"""Fused steps against torch's own loop over the tensors."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bayes.optim.steps.fused import fused_on_cpu

OPTIMIZERS = {
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.9)}),
    "sgd": (torch.optim.SGD, {}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
}
STEPS = 6  # before the last of them a case changes something


class _Names(TorchDispatchMode):
    """Keeps the names of the operations."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(func.name())
        return func(*args, **(kwargs or {}))


def _weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(4, 3, 5, 5), (7,)]]


def _train(base, params, *, fused, change=lambda *_: None):
    """Six steps with the same random gradients; returns the weights and whether the last step was a fused one."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        if step == STEPS - 1:
            change(base, params)
        with _Names() as names:
            if fused:
                with fused_on_cpu(base):
                    base.step()
            else:
                base.step()
    return [param.detach().clone() for param in params], any("_fused_" in name for name in names.found)


def _pair(kind, arguments, change=lambda *_: None, dtype=torch.float32):
    found = []
    for fused in (True, False):
        params = _weights(dtype)
        found.append(_train(kind(params, lr=0.05, **arguments), params, fused=fused, change=change))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kernels_take_the_steps_of_the_loop(name, dtype):
    (fused, is_fused), (looped, was_looped) = _pair(*OPTIMIZERS[name], dtype=dtype)
    assert is_fused
    assert not was_looped
    for a, b in zip(fused, looped, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=20 * torch.finfo(dtype).eps)


def test_groups_and_state_stay_the_users():
    params = _weights()
    base = torch.optim.Adam(params)
    _train(base, params, fused=True)
    assert [group["fused"] for group in base.param_groups] == [None]
    restored = torch.optim.Adam(params, foreach=False)
    restored.load_state_dict(base.state_dict())
    restored.step()  # by the loop


def test_an_error_leaves_the_groups_as_they_were():
    base = torch.optim.Adam(params := _weights())
    seen = []

    def fail(*_):
        seen.append(base.param_groups[0]["fused"])
        raise RuntimeError("no step")

    base.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no step"):
        _train(base, params, fused=True)
    assert seen == [True]
    assert base.param_groups[0]["fused"] is None


class _OwnAdam(torch.optim.Adam):
    """An optimizer of the user's."""


def _last(tensor):
    return tensor.to(memory_format=torch.channels_last)


def _strided_weights(base, params):
    params[0].data = _last(params[0].data)


def _strided_gradients(base, params):
    params[0].grad = _last(params[0].grad)


def _strided_state(base, params):
    base.state[params[0]]["exp_avg"] = _last(base.state[params[0]]["exp_avg"])


def _rate_in_a_tensor(base, params):
    base.param_groups[0]["lr"] = torch.tensor(0.05)


@pytest.mark.parametrize(
    ("kind", "arguments", "change"),
    [
        (torch.optim.Adam, {"foreach": False}, lambda *_: None),
        (torch.optim.Adam, {"foreach": True}, lambda *_: None),
        (torch.optim.Adam, {"fused": False}, lambda *_: None),
        (torch.optim.RMSprop, {}, lambda *_: None),
        (_OwnAdam, {}, lambda *_: None),
        (torch.optim.Adam, {}, _strided_weights),
        (torch.optim.Adam, {}, _strided_gradients),
        (torch.optim.Adam, {}, _strided_state),
        (torch.optim.Adam, {}, _rate_in_a_tensor),
    ],
)
def test_the_rest_steps_as_torch_does(kind, arguments, change):
    (ours, is_fused), (theirs, _) = _pair(kind, arguments, change)
    assert not is_fused
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=20 * torch.finfo(torch.float32).eps)


def test_weights_that_join_later_start_their_momentum():
    def join(base, params):
        base.param_groups[0]["params"].append(params[1])

    ends = []
    for fused in (True, False):
        params = _weights()
        base = torch.optim.SGD([params[0]], lr=0.05, momentum=0.9)
        _, is_fused = _train(base, params, fused=fused, change=join)
        assert not is_fused
        ends.append(_train(base, params, fused=fused))
    (ours, is_fused), (theirs, _) = ends
    assert is_fused
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=20 * torch.finfo(torch.float32).eps)
