"""A user's layer and its rule in one file outside of the package: engines and optimizers find them."""

from __future__ import annotations

import importlib.util
import textwrap

import pytest
import torch
import torch.nn.functional as F
from oracles import one_example_at_a_time, relative_error
from torch import nn

from lightning_bayes.curvature import measure
from lightning_bayes.curvature.rules import registry, rule_for
from lightning_bayes.optim.diagonal.vogn import VOGN

OWN_FILE = '''
    """y = (x₁ ∘ g) + (x₂ ∘ h): a gate for each of two streams of features."""

    import torch
    from torch import nn

    from lightning_bayes.curvature.rules import layer_rule
    from lightning_bayes.curvature.rules.registry import draws


    class TwoGates(nn.Module):
        def __init__(self, features):
            super().__init__()
            self.gate, self.other = nn.Parameter(torch.ones(features)), nn.Linear(features, 1, bias=False)

        def forward(self, first, second, *, scale=1.0):
            return scale * (first * self.gate + second * self.other.weight[0])


    @layer_rule(
        TwoGates,
        parameters=("gate", "other.weight"),
        example_dims=(0, 0),
        cases=[(lambda: TwoGates(3), lambda generator: (*draws((5, 3), (5, 3))(generator), 2.0))],
    )
    def two_gates(layer, inputs, grad_output):
        first, second, scale = inputs
        return {"gate": scale * grad_output * first, "other.weight": (scale * grad_output * second).unsqueeze(1)}
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The imported user module; its rule is unregistered after the test."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    path = tmp_path / "two_gates.py"
    path.write_text(textwrap.dedent(OWN_FILE), "utf-8")
    spec = importlib.util.spec_from_file_location("two_gates", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Network(nn.Module):
    def __init__(self, gates):
        super().__init__()
        self.first, self.gates, self.last = nn.Linear(4, 3), gates, nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.gates(self.first(x), x[:, :3].tanh(), scale=0.5))


@pytest.mark.parametrize("engine", ["fused", "backpack"])
def test_engines_use_the_rule(own, engine, generator, monkeypatch):
    model = Network(own.TwoGates(3)).double()
    x, y = torch.randn(5, 4, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    assert rule_for(model.gates) is own.two_gates
    monkeypatch.setattr(
        "lightning_bayes.curvature.layer_calls.GenericCall.watch", None
    )  # the generic rule is not needed
    truth = one_example_at_a_time(
        model, list(zip(x, y, strict=True)), lambda m, e: F.cross_entropy(m(e[0][None]), e[1][None])
    )
    measured = measure(model, lambda: F.cross_entropy(model(x), y), engine=engine)
    assert relative_error(measured.grad, truth[0]) < 1e-10
    assert relative_error(measured.curvature, truth[1]) < 1e-10


def test_the_cases_of_the_rule_pass_its_contract(own, generator):
    """The checks of `test_rules` for the package's rules."""
    ((build, inputs),) = own.two_gates.cases
    layer, drawn = build().double(), inputs(generator)
    delta = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    found = own.two_gates(layer, drawn, delta)
    for i in range(5):
        one, gradient = own.two_gates.select(layer, drawn, delta, i, 1)
        out = layer(*one[:2], scale=one[2])
        for (name, _), truth in zip(
            layer.named_parameters(), torch.autograd.grad(out, list(layer.parameters()), gradient), strict=True
        ):
            torch.testing.assert_close(found[name][i], truth)


def test_an_optimizer_trains_with_the_rule(own, generator):
    model = Network(own.TwoGates(3))
    optimizer = VOGN(model, lr=0.1, num_data=5, init_precision=10.0)
    before = model.gates.gate.detach().clone()
    with optimizer.sampled_params():
        F.cross_entropy(model(torch.randn(5, 4, generator=generator)), torch.tensor([0, 1, 1, 0, 1])).backward()
    optimizer.step()
    assert not torch.equal(model.gates.gate, before)


def test_a_layer_with_other_parameters_falls_to_the_generic_rule(own):
    """A subclass that adds a parameter is not covered; one that adds nothing is."""

    class Same(own.TwoGates):
        pass

    wider = own.TwoGates(3)
    wider.other = nn.Linear(3, 1)  # a bias that the rule does not name
    assert rule_for(Same(3)) is own.two_gates
    assert rule_for(wider) is None
