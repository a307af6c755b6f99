"""The contract of every layer rule, on the cases listed in its file; the truth is a loop over examples."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bayes.curvature.rules import conv, linear, products, registered_rules, rule_for
from lightning_bayes.curvature.rules.conv import pairs
from lightning_bayes.curvature.rules.conv.plan import STRATEGIES, plan
from lightning_bayes.curvature.rules.conv.shape import conv_shape
from lightning_bayes.curvature.rules.pytree import differentiable
from lightning_bayes.curvature.rules.registry import draws
from lightning_bayes.curvature.workspace import DEFAULT_MIB, Workspace
from lightning_bayes.errors import HyperparameterError

BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}
TYPES = dict.fromkeys(registered_rules().values())
CASES = [(rule, case) for rule in TYPES for case in rule.cases]


def build_case(case, generator):
    """A layer with running statistics and parameters away from their defaults, its inputs, a gradient of its output."""
    build, inputs = case
    layer = build().double()
    for param in layer.parameters():
        nn.init.normal_(param, generator=generator)
    if getattr(layer, "running_mean", None) is not None:
        layer.running_mean.normal_(generator=generator)
        layer.running_var.uniform_(0.5, 2, generator=generator)
    inputs = (inputs if callable(inputs) else draws(inputs))(generator)
    call = inspect.signature(layer.forward).bind(*inputs)
    call.apply_defaults()
    rule, inputs = rule_for(layer), tuple(call.arguments.values())
    outputs = differentiable(layer(*inputs))[0]
    deltas = tuple(torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outputs)
    return rule, layer, inputs, deltas if len(deltas) > 1 else deltas[0]


def _label(case):
    build, inputs = case[1]
    return f"{' '.join(str(build()).split())}-{'drawn' if callable(inputs) else inputs}"


@pytest.fixture(params=CASES, ids=_label)
def case(request, generator):
    rule, case = request.param
    built = build_case(case, generator)
    assert built[0] is rule
    return built


@pytest.mark.parametrize(
    ("kind", "rule"), [pytest.param(*item, id=str(item[0])) for item in registered_rules().items()]
)
def test_every_registered_type_has_a_case(kind, rule):
    def name(layer):
        return f"{type(layer).__module__}.{type(layer).__qualname__}"

    assert kind in {of(build()) for build, _ in rule.cases for of in (type, name)}


def test_rule_equals_a_loop_over_examples(case):
    rule, layer, inputs, delta = case
    found, named = rule(layer, inputs, delta), dict(layer.named_parameters(recurse=not rule.own_only))
    for i in range(rule.num_examples(layer, inputs)):
        one, _ = rule.select(layer, inputs, None, i, 1)
        outputs = differentiable(layer(*one))[0]
        deltas = [of_example(grad, i, out) for grad, out in zip(as_tuple(delta), outputs, strict=True)]
        for name, value in zip(named, torch.autograd.grad(outputs, list(named.values()), deltas), strict=True):
            torch.testing.assert_close(found[name][i], value, rtol=1e-10, atol=1e-12)


def as_tuple(delta):
    return delta if isinstance(delta, tuple) else (delta,)


def of_example(delta, i, output):
    """The part of `delta` that belongs to example i, given its own output."""
    (dim,) = (d for d, (many, one) in enumerate(zip(delta.shape, output.shape, strict=True)) if many != one)
    return delta.narrow(dim, i, 1)


@pytest.mark.parametrize("limit_mib", [DEFAULT_MIB, 1e-9], ids=["all at once", "one at a time"])
def test_sums_are_those_of_the_contributions(case, limit_mib):
    assert_sums_fit(case, Workspace(limit_mib))


@pytest.mark.parametrize("examples", range(1, 7))
def test_uneven_parts_of_a_batch_are_summed_alike(examples, generator, monkeypatch):
    """Patch layouts depend on the number of positions, and the last block has fewer."""
    case = build_case((lambda: nn.Conv2d(3, 8, 3, padding=1), (7, 3, 3, 3)), generator)
    monkeypatch.setattr(Workspace, "examples_at_once", lambda self, elements: examples)
    assert_sums_fit(case, Workspace())


def assert_sums_fit(case, workspace):
    rule, layer, inputs, delta = case
    each = rule(layer, inputs, delta)
    for name, (grad, square) in rule.sums(layer, inputs, delta, workspace).items():
        torch.testing.assert_close(grad, each[name].sum(0), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(square, each[name].square().sum(0), rtol=1e-10, atol=1e-12)
    for name, square in rule.squares(layer, inputs, delta, workspace).items():
        torch.testing.assert_close(square, each[name].square().sum(0), rtol=1e-10, atol=1e-12)


def assert_weight_sums_fit(case, strategy, workspace):
    rule, layer, inputs, delta = case
    each = rule(layer, inputs, delta)["weight"]
    found = strategy.squares(layer, *inputs, delta, workspace)
    torch.testing.assert_close(found, each.square().sum(0), rtol=1e-10, atol=1e-12)


@pytest.fixture(params=conv.conv.cases, ids=lambda case: f"{case[0]()}-{case[1]}")
def conv_case(request, generator):
    return build_case(request.param, generator)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("limit_mib", [DEFAULT_MIB, 1e-9], ids=["all at once", "one at a time"])
def test_every_strategy_computes_any_convolution(strategy, limit_mib, conv_case):
    if conv_case[1].groups > 1 and strategy.name != "patches":
        return
    assert_weight_sums_fit(conv_case, strategy, Workspace(limit_mib))


@pytest.mark.parametrize("rows", [1, 2, 100])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("limit_mib", [DEFAULT_MIB, 1e-9], ids=["all at once", "one at a time"])
def test_sums_in_blocks_are_those_of_the_contributions(conv_case, rows, threads, limit_mib, monkeypatch):
    """As if the weight were too large for one batched product."""
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", rows * conv_case[1].weight[0].numel())
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    if conv_case[1].groups == 1:
        assert_weight_sums_fit(conv_case, BY_NAME["blocks"], Workspace(limit_mib))


@pytest.mark.parametrize("rows", [1, 2, 100])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(5, 6, 4), (5, 2, 6, 4)], ids=str)
def test_linear_sums_in_blocks_are_those_of_the_contributions(shape, rows, threads, generator, monkeypatch):
    monkeypatch.setattr(linear, "MAX_BATCHED_ELEMENTS", 0)
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", rows * 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert_sums_fit(build_case((lambda: nn.Linear(4, 3), shape), generator), Workspace())


@pytest.mark.parametrize(
    ("layer", "size", "name"),
    [
        (nn.Conv2d(16, 16, 3, padding=1), 2, "pairs"),
        (nn.Conv2d(16, 64, 3, padding=1), 40, "blocks"),
        (nn.Conv2d(64, 64, 3, padding=1), 16, "blocks"),
        (nn.Conv2d(3, 16, 3, padding=1), 16, "patches"),
        (nn.Conv2d(64, 64, 3, padding=1, groups=2), 16, "patches"),
    ],
)
def test_plan_names_the_strategy(layer, size, name):
    x = torch.zeros(2, layer.in_channels, size, size, dtype=layer.weight.dtype)
    assert plan(conv_shape(layer, x, layer(x)), x.device).name == name
    assert plan(conv_shape(layer, x, layer(x)), torch.device("cuda")).name in {"pairs", "patches"}


def test_workspace_is_reused_and_keeps_results_apart(generator):
    """Two layers in turn in one workspace: the sums of the first do not change."""
    workspace, variants = (
        Workspace(),
        [(lambda: nn.Conv2d(4, 6, 3), (5, 4, 7, 7)), (lambda: nn.Conv2d(3, 9, 3), (5, 3, 6, 6))],
    )
    first, second = (build_case(variant, generator) for variant in variants)
    found = first[0].squares(*first[1:], workspace)
    kept = {name: square.clone() for name, square in found.items()}
    second[0].squares(*second[1:], workspace)
    assert all(torch.equal(found[name], old) for name, old in kept.items())


class Largest(TorchDispatchMode):
    """Records the largest number of elements that an operation allocates for its result."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out._is_view():
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("batch", [8, 64])
def test_pairs_of_positions_keep_the_limit(batch, padding, generator):
    size = 4 - 2 * padding
    case = (lambda: nn.Conv2d(32, 6, 3, padding=padding), (batch, 32, size, size))
    rule, layer, inputs, delta = build_case(case, generator)
    assert pairs.suits(conv_shape(layer, *inputs, delta), delta.device)
    workspace = Workspace(0.1)  # one to six examples
    with Largest() as found:
        rule.squares(layer, inputs, delta, workspace)
    assert found.elements <= workspace.elements
    assert sum(buffer.numel() for buffer in workspace._buffers.values()) <= workspace.elements


@pytest.mark.parametrize(
    ("layer", "size", "pairs"),
    [
        (
            nn.Conv2d(1, 1, 3, padding=1),
            (2, 2),
            (4 * 1 + 4 * 3 + 10) / 9,
        ),  # corners, edges and the middle of the kernel
        (nn.Conv2d(1, 1, 3, padding=1), (1, 1), 1 / 9),
        (nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), (2, 2), 10.0),
        (nn.Conv1d(1, 1, 2, stride=2), (7,), 6.0),
    ],
)
def test_pairs_are_counted_where_the_kernel_lies_on_pixels(layer, size, pairs):
    x = torch.zeros(1, 1, *size)
    assert conv_shape(layer, x, layer(x)).pairs_per_offset == pytest.approx(pairs)


@pytest.mark.parametrize("limit_mib", [0, -1.0, float("nan")])
def test_workspace_without_room_is_refused(limit_mib):
    with pytest.raises(HyperparameterError, match=rf"workspace_mib={limit_mib!r} must be above 0"):
        Workspace(limit_mib)


def test_rule_leaves_its_arguments_alone(case):
    rule, layer, inputs, delta = case
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    kept = [x.clone() if isinstance(x, torch.Tensor) else x for x in (*inputs, *as_tuple(delta))]
    rule.sums(layer, inputs, delta, Workspace())
    rule.squares(layer, inputs, delta, Workspace())
    for x, y in zip((*inputs, *as_tuple(delta)), kept, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x is y
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())


def test_no_example_contributes_nothing(case):
    rule, layer, inputs, delta = case
    inputs, delta = rule.select(layer, inputs, delta, 0, 0)
    for name, (grad, square) in rule.sums(layer, inputs, delta, Workspace()).items():
        assert not grad.any()
        assert not square.any()
        assert rule(layer, inputs, delta)[name].shape == (0, *grad.shape)


def test_input_of_a_batch_has_the_least_dimensions_or_more(case):
    rule, layer, inputs, _ = case
    assert rule.least_dims(layer) <= inputs[0].dim()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolutions_take_any_memory_format(memory_format, generator):
    rule, layer, (x,), delta = build_case((lambda: nn.Conv2d(4, 6, 3, padding=1), (5, 4, 7, 7)), generator)
    truth = rule(layer, (x,), delta)
    found = rule(layer, (x.to(memory_format=memory_format),), delta.to(memory_format=memory_format))
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
