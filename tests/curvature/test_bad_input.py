"""Unusual models, batches and passes: right against the loop, or refused by name before any update."""

from __future__ import annotations

import copy
import dataclasses
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from oracles import assert_measures, relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_bayes.curvature import make_engine, measure
from lightning_bayes.errors import (
    BayesError,
    NoMeasurementError,
    UnsupportedLayerError,
    UnsupportedTrainingError,
)
from lightning_bayes.optim import VOGN, NoisyKFAC

ENGINES = ["fused", "backpack"]
every_engine = pytest.mark.parametrize("engine", ENGINES)
may_loop = pytest.mark.filterwarnings("ignore:.*needs one backward pass for each of the:UserWarning")


def batch(generator, size=6, features=4):
    return torch.randn(size, features, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def classify(model, example):
    return F.cross_entropy(model(example[0][None]), example[1][None])


def assert_right(model, x, y, engine="fused", called=None, one=classify):
    measured = measure(model, lambda: F.cross_entropy((called or model)(x), y), engine=engine)
    assert_measures(measured, model, list(zip(x, y, strict=True)), one, 1e-5)


def assert_refused(model, loss, match, engine="fused", error=BayesError):
    """By `measure`, and by an optimizer that leaves the weights as they were, bit for bit."""
    with pytest.raises(error, match=match):
        measure(model, loss, engine=engine)
    kept = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=match):
        train(model, loss, engine)
    assert all(torch.equal(kept[name], p) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def train(model, loss, engine):
    optimizer = VOGN(model, lr=0.1, num_data=10, init_precision=10.0, engine=engine)
    with optimizer.sampled_params():
        loss().backward()
    optimizer.step()


@every_engine
@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Bilinear(4, 4, 3)], ids=["rule", "generic"])
def test_empty_batch_is_refused(layer, engine):
    model, x = nn.ModuleList([layer]), torch.zeros(0, 4)
    inputs = (x, x) if isinstance(layer, nn.Bilinear) else (x,)
    assert_refused(model, lambda: model[0](*inputs).sum(), r"The batch holds no example \(seen by 0", engine)


@every_engine
def test_half_precision_parameters(engine, generator):
    """Measured in single precision; an optimizer refuses them."""
    x, y = batch(generator)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)).bfloat16()
    x = x.bfloat16()
    tiny = measure(model, lambda: 1e-15 * F.cross_entropy(model(x).float(), y), engine=engine)
    exact = copy.deepcopy(model).float()
    truth = measure(exact, lambda: 1e-15 * F.cross_entropy(exact(x.float()), y))
    assert {value.dtype for value in tiny.curvature.values()} == {torch.float32}
    assert relative_error(tiny.curvature, truth.curvature) < 0.05  # activations of 8 bits
    with pytest.raises(UnsupportedTrainingError, match=r"Parameters are stored as torch\.bfloat16"):
        VOGN(model, num_data=10, engine=engine)


@every_engine
def test_complex_parameters_are_refused(engine, generator):
    model = nn.Sequential(nn.Linear(4, 3, dtype=torch.cfloat), nn.Linear(3, 3, dtype=torch.cfloat))
    model[1].requires_grad_(False)
    x = torch.randn(6, 4, generator=generator, dtype=torch.cfloat)
    assert_refused(
        model, lambda: model(x).abs().mean(), r"are complex: 0\.weight, 0\.bias\. The square.*freeze them", engine
    )


class TiedByView(nn.Module):
    """One memory, two parameters: a linear weight and a 1x1 convolution's."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.Linear(4, 3)
        self.second.weight = nn.Parameter(self.first.weight.detach().view(4, 4, 1))

    def forward(self, x):
        return self.head(self.second(self.first(x)[..., None])[..., 0])


@every_engine
def test_views_of_the_same_memory_are_refused(engine, generator):
    """Sampling one would move the other, and restoring both would leave one's noise."""
    (x, y), model = batch(generator), TiedByView()
    assert_refused(
        model, lambda: F.cross_entropy(model(x), y), "first.weight and second.weight.*same nn.Parameter", engine
    )


def test_views_of_different_parts_of_one_memory_are_fine(generator):
    (x, y), memory = batch(generator), torch.randn(24, generator=generator)
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[0].weight = nn.Parameter(memory[:12].view(3, 4))
    model[1].weight = nn.Parameter(memory[12:21].view(3, 3))
    assert_right(model, x, y)


class Vocabulary(nn.Module):
    """A linear layer and an embedding with the same parameter: two rules."""

    def __init__(self, functional):
        super().__init__()
        self.embed, self.out, self.functional = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False), functional
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens).mean(1).tanh()
        return F.linear(hidden, self.embed.weight) if self.functional else self.out(hidden)


def test_linear_weight_tied_to_an_embedding(generator):
    x, y = torch.randint(0, 7, (6, 3), generator=generator), torch.randint(0, 7, (6,), generator=generator)
    for engine in ENGINES:
        assert_right(Vocabulary(functional=False), x, y, engine)


@may_loop
def test_weight_used_beside_its_module(generator):
    """Only the embedding's share would be squared by its rule, while the gradient is complete."""
    model = Vocabulary(functional=True)
    del model.out
    x, y = torch.randint(0, 7, (6, 3), generator=generator), torch.randint(0, 7, (6,), generator=generator)
    for engine in ENGINES:
        assert_right(model, x, y, engine)


class Outputs(nn.Module):
    """A nest of outputs, from a module that holds a parameter itself, or from its layers."""

    def __init__(self, own):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(4)) if own else torch.ones(4)

    def forward(self, x):
        return {"logits": (self.first(self.scale * x), 3), "other": [None, self.second(x), "name"]}


@every_engine
@pytest.mark.parametrize("own", [True, False])
def test_outputs_in_tuples_lists_and_dictionaries(own, engine, generator):
    (x, y), model = batch(generator), Outputs(own)

    def logits(found):
        return found["logits"][0] + found["other"][1].tanh()

    assert_right(
        model, x, y, engine, lambda z: logits(model(z)), lambda m, e: F.cross_entropy(logits(m(e[0][None])), e[1][None])
    )


@dataclasses.dataclass
class Logits:
    logits: torch.Tensor


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Logits(self.scale * x)


def test_output_whose_tensors_cannot_be_found_is_refused(generator):
    """Its parameters would get no gradient, unnoticed beside others that do."""
    (x, y), model = batch(generator), nn.ModuleList([Hidden(), nn.Linear(4, 3)])
    assert_refused(
        model, lambda: F.cross_entropy(model[1](model[0](x).logits), y), "returns Logits, which may hide tensors"
    )


def size_of(model):
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(model, file)
    return file.tell()


@every_engine
def test_forward_without_backward_leaves_nothing(engine, generator):
    x, y = batch(generator)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    optimizer = VOGN(model, lr=0.1, num_data=10, init_precision=10.0, engine=engine)
    before, mean = size_of(model), copy.deepcopy(model.state_dict())
    for _ in range(2):
        with optimizer.sampled_params():
            model(x)
    assert all(torch.equal(mean[name], p) for name, p in model.named_parameters())
    assert size_of(model) == before
    assert size_of(copy.deepcopy(model)) == before
    with pytest.raises(NoMeasurementError, match=r"without measured gradients.*inside"):
        optimizer.step()
    with optimizer.sampled_params():
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert size_of(model.zero_grad() or model) == before
    assert_right(model, x, y, engine)


@every_engine
def test_backward_without_forward_is_refused(engine, generator):
    """A graph built outside of the pass, under other weights."""
    (x, y), model = batch(generator), nn.Linear(4, 3)
    loss = F.cross_entropy(model(x), y)
    optimizer = VOGN(model, lr=0.1, num_data=10, init_precision=10.0, engine=engine)
    mean = copy.deepcopy(model.state_dict())
    with pytest.raises(BayesError, match="outside of its module's forward"), optimizer.sampled_params():
        loss.backward()
    assert all(torch.equal(mean[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize(("method", "engine"), [(VOGN, "fused"), (VOGN, "backpack"), (NoisyKFAC, "fused")])
def test_second_backward_is_refused(method, engine, generator):
    (x, y), model = batch(generator), nn.Linear(4, 3)
    optimizer = method(model, lr=0.1, num_data=10, init_precision=10.0, engine=engine)
    mean = copy.deepcopy(model.state_dict())

    def pass_with_two_backwards():
        with optimizer.sampled_params():
            loss = F.cross_entropy(model(x), y)
            loss.backward(retain_graph=True)
            loss.backward()

    with pytest.raises(BayesError, match="second backward"):
        pass_with_two_backwards()
    assert all(torch.equal(mean[name], p) for name, p in model.named_parameters())


@every_engine
def test_backwards_of_differently_reduced_losses_are_refused(engine, generator):
    """Each reaches layers of its own, but there is one scale for the pass."""
    (x, y), model = batch(generator), nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    optimizer = VOGN(model, lr=0.1, num_data=10, init_precision=10.0, engine=engine)

    def pass_with_two_backwards():
        with optimizer.sampled_params():
            F.cross_entropy(model[0](x), y, reduction="sum").backward()
            F.cross_entropy(model[1](x), y).backward()

    with pytest.raises(UnsupportedTrainingError, match="One backward of this pass"):
        pass_with_two_backwards()


def replaced(module):
    return nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 3))


PARAMETRIZED = {
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).eval(),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_layers(name, generator):
    (x, y), model = batch(generator), replaced(PARAMETRIZED[name]())
    for engine in ENGINES:
        assert_right(model, x, y, engine)


@every_engine
def test_sync_batch_norm_in_one_process_is_batch_norm(engine, generator):
    (x, y), model = batch(generator), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    joined = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    expected = measure(model, lambda: F.cross_entropy(model(x), y)).curvature
    found = measure(joined, lambda: F.cross_entropy(joined(x), y), engine=engine).curvature
    assert relative_error(found, expected) < 1e-6
    assert_right(joined.eval(), x, y, engine)


@every_engine
def test_sync_batch_norm_over_processes(engine, generator, monkeypatch):
    """Refused at the statistics of all processes' batches, and measured at the running ones."""
    for name in ("batch_norm", "whole_batch"):
        joins = f"lightning_bayes.curvature.rules.{name}.joins_processes"
        monkeypatch.setattr(joins, lambda module: isinstance(module, nn.SyncBatchNorm))
    (x, y), model = batch(generator), nn.Sequential(nn.SyncBatchNorm(4), nn.Linear(4, 3))
    refused = r"SyncBatchNorm has no curvature rule.*normalises over"
    assert_refused(model, lambda: F.cross_entropy(model(x), y), refused, engine)
    assert_right(model.eval(), x, y, engine)


@every_engine
def test_lazy_layers(engine, generator):
    """The first forward gives them their shape; an optimizer needs it before."""
    (x, y), model = batch(generator), nn.Sequential(nn.LazyLinear(5), nn.ReLU(inplace=True), nn.LazyLinear(3))
    with pytest.raises(
        UnsupportedLayerError, match=r"0\.weight, 0\.bias, 2\.weight, 2\.bias have no size yet\. Call the model"
    ):
        VOGN(model, num_data=10, engine=engine)
    assert_right(model, x, y, engine)


class Checkpointing(nn.Module):
    """It holds a parameter itself, and recomputes inside."""

    def __init__(self, reentrant):
        super().__init__()
        self.scale, self.layer, self.reentrant = nn.Parameter(torch.ones(4)), nn.Linear(4, 3), reentrant

    def forward(self, x):
        return checkpoint(self.layer, self.scale * x, use_reentrant=self.reentrant)


def test_a_checkpoint_inside_of_a_module_with_own_parameters_is_measured(generator):
    (x, y), model = batch(generator), nn.Sequential(Checkpointing(reentrant=False))
    assert_right(model, x, y)
    x.requires_grad_()
    found = []
    for model[0].reentrant in (False, True):
        found.append(measure(model, lambda: F.cross_entropy(model(x), y)))
    torch.testing.assert_close(found[1].curvature, found[0].curvature)


class Direct(nn.Module):
    def __init__(self, parameters):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        for number in range(parameters):
            self.register_parameter(f"scale{number}", nn.Parameter(torch.ones(3)))

    def training_step(self, x):
        return F.mse_loss(self.layer(x) * sum(self._parameters.values()), torch.zeros_like(x))


@pytest.mark.parametrize("parameters", [1, 200])
def test_parameters_beside_layers_are_named_in_a_short_message(parameters, generator):
    model, x = Direct(parameters), torch.randn(4, 3, generator=generator)
    with pytest.raises(
        UnsupportedLayerError, match=r"^No curvature rule can measure scale0: it gets a gradient outside"
    ) as caught:
        measure(model, lambda: model.training_step(x), "kfac")
    assert len(str(caught.value)) <= 600


class NeedsTwo(nn.Module):
    """Runs on a batch, not on one example of it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        if len(x) < 2:
            raise ValueError("at least two rows, please" + " and more" * 1000)
        return x * self.scale


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_module_that_fails_on_single_examples_is_looped_or_named(generator):
    model, x = nn.Sequential(NeedsTwo()), torch.randn(4, 3, generator=generator)
    with pytest.warns(UserWarning, match=r"^0\.scale: all examples share .* each of the 4 examples"):
        measured = measure(model, lambda: model(x).square().mean())
    torch.testing.assert_close(measured.curvature["0.scale"], (2 / 3 * x.square()).square().mean(0))
    engine = make_engine("fused", model)
    with pytest.raises(BayesError, match=r"0 \(NeedsTwo\).*at least two rows, please") as caught, engine.capture():
        model(x).square().mean().backward()  # the loss is not observed
    assert len(str(caught.value)) <= 600
