"""Any contents of a batch: the update is made of finite numbers or skipped, and the weights are the mean."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from fuzz_settings import fuzz
from hypothesis import strategies as st
from optimizer_family import OPTIMIZERS, construct, from_backpack, step_rules
from torch import nn

from lightning_bayes.errors import BayesError

FAST = [cls for cls in OPTIMIZERS if not from_backpack(cls)]
CASES = [(cls, rule) for cls in FAST for rule in step_rules(cls) if rule != "user"]
scales = st.sampled_from([0.0, 1e-30, 1e-8, 1.0, 1.0, 1e4, 1e19, 1e38])
spoilers = st.sampled_from([None, None, None, float("nan"), float("inf"), -float("inf")])


@st.composite
def batches(draw):
    """Inputs of any size, repeated or not, with a value that is not finite now and then; labels of one class or of all."""
    size, seed = draw(st.integers(1, 6)), draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    x = draw(scales) * torch.randn(1 if draw(st.booleans()) else size, 4, generator=generator).expand(size, 4)
    y = torch.randint(draw(st.sampled_from([1, 3])), (size,), generator=generator)
    spoiler = draw(spoilers)
    if spoiler is not None:
        x = x.clone()
        x[draw(st.integers(0, size - 1)), draw(st.integers(0, 3))] = spoiler
    return x, y


def everything(model, optimizer):
    states = [optimizer.state[p] for p in model.parameters()]
    tensors = {f"{i}.{k}": v for i, state in enumerate(states) for k, v in state.items() if isinstance(v, torch.Tensor)}
    return {**{n: p.detach() for n, p in model.named_parameters()}, **tensors}


@fuzz(
    60,
    1000,
    case=st.sampled_from(CASES),
    contents=st.lists(batches(), min_size=1, max_size=4),
)
def test_any_batch_gives_finite_numbers_or_is_skipped(case, contents):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer_class, step_rule = case
    optimizer = construct(optimizer_class, model, num_data=100, damping=1e-2, step_rule=step_rule)
    with optimizer.sampled_params():
        pass  # the first one starts the states of some optimizers
    for x, y in contents:
        before = {name: value.clone() for name, value in everything(model, optimizer).items()}
        updates, skipped = optimizer.num_updates, optimizer.skipped_steps
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                with optimizer.sampled_params():
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
            except BayesError:
                skipped -= 1
        after = everything(model, optimizer)
        assert all(value.isfinite().all() for value in after.values())
        if optimizer.num_updates == updates:
            assert all(torch.equal(after[name], value) for name, value in before.items())
            assert optimizer.skipped_steps == skipped + 1
            assert optimizer.skipped_steps == 0 or said
