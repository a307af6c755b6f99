"""What every layer rule promises, against its slower twin, the generic rule."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bayes.curvature.rules import conv, conv_pointwise, linear, products, rule_type
from lightning_bayes.curvature.rules.generic import Call
from lightning_bayes.curvature.rules.registry import _RULES, input_dims, per_example, sums
from lightning_bayes.curvature.workspace import DEFAULT_MIB, Workspace
from lightning_bayes.errors import HyperparameterError

VARIANTS = [  # (how to build the layer, shape of its input)
    (lambda: nn.Linear(4, 3), (5, 4)),
    (lambda: nn.Linear(4, 3, bias=False), (5, 6, 4)),
    (lambda: nn.Linear(4, 3), (5, 2, 6, 4)),
    (lambda: nn.Conv1d(4, 6, 3), (5, 4, 9)),
    (lambda: nn.Conv1d(4, 6, 4, padding="same", dilation=2, bias=False), (5, 4, 9)),
    (lambda: nn.Conv1d(4, 4, 5, stride=3, padding=2, groups=4, padding_mode="reflect"), (5, 4, 9)),
    (lambda: nn.Conv1d(4, 6, 7, groups=2), (5, 4, 9)),  # three positions
    (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (5, 4, 7, 7)),
    (lambda: nn.Conv2d(4, 6, (3, 5), stride=(2, 1), padding=(0, 2), bias=False), (5, 4, 7, 8)),
    (lambda: nn.Conv2d(4, 8, 3, dilation=(2, 1), groups=4, padding="valid"), (5, 4, 7, 7)),
    (lambda: nn.Conv2d(4, 6, (3, 4), padding="same", dilation=(1, 2)), (5, 4, 7, 7)),
    (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=(2, 1), padding_mode="circular"), (5, 4, 7, 7)),
    (lambda: nn.Conv2d(4, 6, 3, padding=2, padding_mode="replicate"), (5, 4, 7, 7)),
    (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), (5, 4, 5, 5)),  # four positions
    (lambda: nn.Conv2d(2, 6, 5), (5, 2, 8, 8)),  # ten columns, padded to sixteen
    (lambda: nn.Conv2d(6, 4, (3, 4), groups=2), (5, 6, 7, 8)),
    (lambda: nn.Conv2d(3, 6, 3, stride=2), (5, 3, 9, 9)),
    (lambda: nn.Conv2d(2, 16, 3, padding=1), (5, 2, 5, 6)),  # sixteen rows, so products are transposed
    (lambda: nn.Conv2d(4, 32, 3, groups=2, stride=2), (5, 4, 7, 7)),
    (lambda: nn.Conv2d(4, 6, 3, padding=1), (5, 4, 1, 1)),  # one position
    (lambda: nn.Conv3d(4, 6, (1, 2, 3), padding=(0, 1, 2), groups=2), (5, 4, 3, 4, 5)),
    (lambda: nn.Conv3d(4, 4, 2, stride=(1, 2, 3), dilation=(2, 1, 1), groups=4, bias=False), (5, 4, 3, 4, 5)),
    (lambda: nn.Conv3d(4, 3, (2, 3, 2), padding="same", padding_mode="circular"), (5, 4, 3, 4, 5)),
    (lambda: nn.Conv3d(4, 3, (3, 4, 4)), (5, 4, 3, 4, 5)),  # two positions
    (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, groups=2), (5, 4, 5)),
    (lambda: nn.ConvTranspose1d(4, 6, 3, padding=2, dilation=2, bias=False), (5, 4, 5)),
    (lambda: nn.ConvTranspose2d(4, 6, 3), (5, 4, 3, 5)),
    (lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 3), padding=(1, 0), output_padding=(1, 2)), (5, 4, 3, 5)),
    (lambda: nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1, dilation=2, groups=4), (5, 4, 3, 5)),
    (lambda: nn.ConvTranspose2d(4, 6, 1, stride=3), (5, 4, 3, 5)),  # outputs that no input reaches
    (lambda: nn.ConvTranspose3d(4, 6, (2, 3, 1), stride=(2, 1, 1), padding=(0, 1, 0), groups=2), (5, 4, 2, 3, 4)),
    (lambda: nn.BatchNorm1d(4).eval(), (5, 4)),
    (lambda: nn.BatchNorm1d(4).eval(), (5, 4, 6)),
    (lambda: nn.BatchNorm2d(4).eval(), (5, 4, 3, 3)),
    (lambda: nn.BatchNorm3d(4).eval(), (5, 4, 2, 3, 3)),
    (lambda: nn.InstanceNorm1d(4, affine=True), (5, 4, 6)),
    (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (5, 4, 3, 3)),
    (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True).eval(), (5, 4, 3, 3)),
    (lambda: nn.InstanceNorm3d(4, affine=True).eval(), (5, 4, 2, 3, 3)),
    (lambda: nn.LayerNorm(4), (5, 4)),
    (lambda: nn.LayerNorm((3, 4)), (5, 2, 3, 4)),
    (lambda: nn.LayerNorm(4, bias=False), (5, 2, 3, 4)),
    (lambda: nn.RMSNorm(4), (5, 4)),
    (lambda: nn.RMSNorm((3, 4), eps=1e-3), (5, 2, 3, 4)),
    (lambda: nn.GroupNorm(2, 4), (5, 4)),
    (lambda: nn.GroupNorm(1, 4), (5, 4, 3, 3)),
    (lambda: nn.PReLU(), (5, 4, 3)),
    (lambda: nn.PReLU(), (5,)),
    (lambda: nn.PReLU(4), (5, 4)),
    (lambda: nn.PReLU(4), (5, 4, 3, 3)),
    (lambda: nn.Embedding(7, 3), (5,)),
    (lambda: nn.Embedding(7, 3, padding_idx=2), (5, 6)),
]


def build_case(variant, generator):
    """A layer with running statistics and parameters away from their defaults, an input, a gradient of its output."""
    build, shape = variant
    layer = build().double()
    for param in layer.parameters():
        nn.init.normal_(param, generator=generator)
    if getattr(layer, "running_mean", None) is not None:
        layer.running_mean.normal_(generator=generator)
        layer.running_var.uniform_(0.5, 2, generator=generator)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if isinstance(layer, nn.Embedding):
        x = torch.randint(0, layer.num_embeddings, shape, generator=generator)
    delta = torch.randn(layer(x).shape, generator=generator, dtype=torch.float64)
    return rule_type(layer), layer, x, delta


def _label(variant):
    return f"{variant[0]()}-{variant[1]}"


@pytest.fixture(params=VARIANTS, ids=_label)
def case(request, generator):
    return build_case(request.param, generator)


def test_every_registered_type_has_a_variant():
    assert {type(build()) for build, _ in VARIANTS} == set(_RULES)


def test_rule_equals_the_generic_rule(case):
    kind, layer, x, delta = case
    params = {name: p.detach() for name, p in layer.named_parameters()}
    twin = Call(layer, (x,), {}).per_example(params, [delta])
    found = per_example(kind, layer, x, delta)
    for name, truth in twin.items():
        torch.testing.assert_close(found[name], truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("limit_mib", [DEFAULT_MIB, 1e-9], ids=["all at once", "one at a time"])
def test_sums_are_those_of_the_contributions(case, limit_mib):
    assert_sums_fit(case, Workspace(limit_mib))


@pytest.mark.parametrize("examples", range(1, 7))
def test_uneven_parts_of_a_batch_are_summed_alike(examples, generator, monkeypatch):
    """Layouts of patches are chosen by the number of positions, of which the last part has fewer."""
    case = build_case((lambda: nn.Conv2d(3, 8, 3, padding=1), (7, 3, 3, 3)), generator)
    monkeypatch.setattr(Workspace, "examples_at_once", lambda self, elements: examples)
    assert_sums_fit(case, Workspace())


def assert_sums_fit(case, workspace):
    kind, layer, x, delta = case
    each = per_example(kind, layer, x, delta)
    for name, (grad, square) in sums(kind, layer, x, delta, workspace).items():
        torch.testing.assert_close(grad, each[name].sum(0), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(square, each[name].square().sum(0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 100])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("limit_mib", [DEFAULT_MIB, 1e-9], ids=["all at once", "one at a time"])
def test_sums_in_blocks_are_those_of_the_contributions(case, rows, threads, limit_mib, monkeypatch):
    """As if the weight were too large for one batched product."""
    if not isinstance(case[1], nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return
    monkeypatch.setattr(conv, "MAX_BATCHED_ELEMENTS", 0)
    monkeypatch.setattr(linear, "MAX_BATCHED_ELEMENTS", 0)
    monkeypatch.setattr(conv, "MAX_PAIRS", 0)
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", rows * case[1].weight[0].numel())
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert_sums_fit(case, Workspace(limit_mib))


@pytest.mark.parametrize("own_positions", [0, 2**20], ids=["torch's own gradients", "pointwise convolutions"])
@pytest.mark.parametrize(("elements", "limit_mib"), [(2**20, DEFAULT_MIB), (64, 1e-9)], ids=["whole", "in parts"])
def test_sums_by_convolutions_are_those_of_the_contributions(own_positions, elements, limit_mib, case, monkeypatch):
    """As if every layer were large enough, and its products were cut into parts."""
    if not isinstance(case[1], nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return
    monkeypatch.setattr(conv, "OWN_POSITIONS", own_positions)
    monkeypatch.setattr(conv, "POINTWISE_POSITIONS", 0)
    monkeypatch.setattr(conv, "MIN_OPERATIONS", 0)
    monkeypatch.setattr(conv, "FAST_TYPES", (torch.float64,))
    monkeypatch.setattr(conv, "MAX_PAIRS", 0)
    monkeypatch.setattr(conv_pointwise, "BLOCK_ELEMENTS", elements)
    assert_sums_fit(case, Workspace(limit_mib))


def test_workspace_is_reused_and_keeps_results_apart(generator):
    """Two layers after one another in one workspace: the first one's sums do not change."""
    workspace, variants = (
        Workspace(),
        [(lambda: nn.Conv2d(4, 6, 3), (5, 4, 7, 7)), (lambda: nn.Conv2d(3, 9, 3), (5, 3, 6, 6))],
    )
    first, second = (build_case(variant, generator) for variant in variants)
    found = sums(*first, workspace)
    kept = {name: (grad.clone(), square.clone()) for name, (grad, square) in found.items()}
    sums(*second, workspace)
    assert all(torch.equal(new, old) for name in kept for new, old in zip(found[name], kept[name], strict=True))


class Largest(TorchDispatchMode):
    """Notes the largest number of elements that an operation returns in memory of its own."""

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
    kind, layer, x, delta = build_case(
        (lambda: nn.Conv2d(32, 6, 3, padding=padding), (batch, 32, size, size)), generator
    )
    assert conv.pairs_per_offset(layer, x, delta) <= conv.MAX_PAIRS
    workspace = Workspace(0.1)  # one to six examples
    with Largest() as found:
        sums(kind, layer, x, delta, workspace)
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
    assert conv.pairs_per_offset(layer, x, layer(x)) == pytest.approx(pairs)


@pytest.mark.parametrize("limit_mib", [0, -1.0, float("nan")])
def test_workspace_without_room_is_refused(limit_mib):
    with pytest.raises(HyperparameterError, match=rf"workspace_mib={limit_mib!r} must be above 0"):
        Workspace(limit_mib)


def test_rule_leaves_its_arguments_alone(case):
    kind, layer, x, delta = case
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    kept = x.clone(), delta.clone()
    sums(kind, layer, x, delta, Workspace())
    assert torch.equal(x, kept[0])
    assert torch.equal(delta, kept[1])
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())


def test_no_example_contributes_nothing(case):
    kind, layer, x, delta = case
    for name, (grad, square) in sums(kind, layer, x[:0], delta[:0], Workspace()).items():
        assert not grad.any()
        assert not square.any()
        assert per_example(kind, layer, x[:0], delta[:0])[name].shape == (0, *grad.shape)


def test_input_of_a_batch_has_the_least_dimensions_or_more(case):
    kind, layer, x, _ = case
    assert input_dims(kind, layer) <= x.dim()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolutions_take_any_memory_format(memory_format, generator):
    kind, layer, x, delta = build_case((lambda: nn.Conv2d(4, 6, 3, padding=1), (5, 4, 7, 7)), generator)
    truth = per_example(kind, layer, x, delta)
    found = per_example(kind, layer, x.to(memory_format=memory_format), delta.to(memory_format=memory_format))
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
