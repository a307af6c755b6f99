"""Accumulation under every host: without noise the mean takes the plain loop's step; the curvature is all examples'.

``python -m pytest -s tests/cases/test_hosts.py`` prints the rows of the table in docs/hosts.md.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from oracles import mean_squares
from tiny_training import fit
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes import IVON, VOGN, VadaGrad, VOGNCallback

BATCHES, SIZE = 4, 4  # micro-batches of the only update, and their examples


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def data():
    x = torch.randn(BATCHES * SIZE, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 1)


def batches():
    return zip(*(tensor.split(SIZE) for tensor in data()), strict=True)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def noiseless(model, method=VOGN):
    return method(model, base=sgd(model), num_data=100, relative_noise=1e-30)


def passes(optimizer):
    """The context of a pass, also of plain SGD."""
    return optimizer.sampled_params() if hasattr(optimizer, "sampled_params") else nullcontext()


def plain_loop(model, optimizer, divisor):
    for x, y in batches():
        with passes(optimizer):
            loss = F.cross_entropy(model(x), y)
            (loss / divisor if divisor > 1 else loss).backward()
    optimizer.step()


def fabric(model, optimizer, divisor):
    host = Fabric(accelerator="cpu", devices=1)
    module, stepper = host.setup(model, optimizer)
    for x, y in batches():
        with passes(optimizer):
            host.backward(F.cross_entropy(module(x), y) / divisor)
    stepper.step()


def accelerate(model, optimizer, divisor):
    library = pytest.importorskip("accelerate")
    host = library.Accelerator(cpu=True, gradient_accumulation_steps=divisor)
    module, stepper = host.prepare(model, optimizer)
    for x, y in batches():
        with host.accumulate(module), passes(optimizer):
            host.backward(F.cross_entropy(module(x), y))
        stepper.step()
        stepper.zero_grad()


class Manual(LightningModule):
    def __init__(self, model, optimizer, divisor):
        super().__init__()
        self.automatic_optimization = False
        self.model, self.optimizer, self.divisor = model, optimizer, divisor

    def configure_optimizers(self):
        return self.optimizer

    def training_step(self, batch, batch_idx):
        with passes(self.optimizer):
            self.manual_backward(F.cross_entropy(self.model(batch[0]), batch[1]) / self.divisor)
        if batch_idx == BATCHES - 1:
            self.optimizers().step()


def loader():
    return DataLoader(TensorDataset(*data()), batch_size=SIZE)


def manual_optimization(model, optimizer, divisor):
    fit(Manual(model, optimizer, divisor), data=loader(), max_epochs=1)


HOSTS = {
    "plain loop, loss": (plain_loop, 1),
    "plain loop, loss / k": (plain_loop, BATCHES),
    "Fabric, loss": (fabric, 1),
    "Fabric, loss / k": (fabric, BATCHES),
    "manual optimization, loss": (manual_optimization, 1),
    "manual optimization, loss / k": (manual_optimization, BATCHES),
    "accelerate, gradient_accumulation_steps=k": (accelerate, BATCHES),
}


def distance(one, other):
    return max(float((a - b).detach().abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def curvature_error(model, optimizer, expected):
    """The largest relative error of the curvature."""
    found = {name: optimizer.state[model.get_parameter(name)]["curvature"] for name in expected}
    return max(float((found[name] - value).norm() / value.norm()) for name, value in expected.items())


def of_all_examples(model):
    x, y = data()
    return mean_squares(model, (F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))))


@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
@pytest.mark.parametrize("name", HOSTS)
def test_a_host_moves_the_mean_by_the_plain_loops_step_and_measures_the_curvature_of_all_examples(name):
    host, divisor = HOSTS[name]
    model, plain = network(), network()
    expected, optimizer = of_all_examples(model), noiseless(model)
    host(model, optimizer, divisor)
    plain_loop(plain, sgd(plain), divisor)
    moved, error = distance(model, plain), curvature_error(model, optimizer, expected)
    print(f"| {name} | {moved:.0e} | {error:.0e} |")
    assert distance(plain, network()) > 1e-4
    assert moved < 1e-7
    assert error < 1e-7


class Automatic(Manual):
    def __init__(self, model):
        super().__init__(model, sgd(model), 1)
        self.automatic_optimization = True

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.model(batch[0]), batch[1])


def test_lightnings_trainer_moves_the_mean_and_measures_as_the_plain_loop():
    model, plain = network(), network()
    expected, callback = of_all_examples(model), VOGNCallback(relative_noise=1e-30)
    fit(Automatic(model), callback, data=loader(), max_epochs=1, accumulate_grad_batches=BATCHES)
    plain_loop(plain, sgd(plain), BATCHES)
    moved, error = distance(model, plain), curvature_error(model, callback.optimizer, expected)
    print(f"| Trainer, accumulate_grad_batches=k | {moved:.0e} | {error:.0e} |")
    assert moved < 1e-7
    assert error < 1e-7


def classifier_of_texts(transformers):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=8, **sizes, **dropout)
    return transformers.BertForSequenceClassification(config), lambda ids, i: i % 2


def language_model(transformers):
    """Its loss is a sum over tokens, divided by their number in all micro-batches."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.LlamaConfig(vocab_size=30, num_key_value_heads=1, pad_token_id=0, **sizes)
    return transformers.LlamaForCausalLM(config), lambda ids, i: ids


@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*one backward pass for each of the")
@pytest.mark.filterwarnings("ignore:The loss does not show how it reduces")
@pytest.mark.parametrize("kind", [classifier_of_texts, language_model])
def test_transformers_trainer_moves_the_mean_and_measures_as_one_large_batch(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start, label = kind(transformers)
    tokens = [torch.arange(i + 1, i + 9) for i in range(16)]
    texts = [{"input_ids": ids, "labels": label(ids, i)} for i, ids in enumerate(tokens)]

    class Sampled(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            with passes(inner):
                return super().training_step(*args, **kwargs)

    found = []
    for is_noisy, steps in ((True, BATCHES), (False, BATCHES), (True, 1)):
        model = copy.deepcopy(start).double()
        inner = noiseless(model) if is_noisy else sgd(model)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=16 // steps,
            gradient_accumulation_steps=steps,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            lr_scheduler_type="constant",
            logging_strategy="no",
        )
        Sampled(model, arguments, train_dataset=texts, optimizers=(inner, None)).train()
        found.append((model, inner))
    (model, optimizer), (plain, _), (whole, large) = found
    moved = distance(model, plain)
    measured = {name: large.state[param].get("curvature") for name, param in whole.named_parameters()}
    expected = {name: value for name, value in measured.items() if value is not None and bool(value.any())}
    error = curvature_error(model, optimizer, expected)
    print(f"| transformers.Trainer, {type(model).__name__} | {moved:.0e} | {error:.0e} |")
    assert distance(plain, start) > 1e-6
    assert moved < 1e-7
    assert error < 1e-7


@pytest.mark.parametrize("method", [IVON, VadaGrad])
def test_other_estimators_measure_the_same_whether_the_loop_divides_or_not(method):
    found = []
    for divisor in (1, BATCHES):
        model = network()
        optimizer = method(model, num_data=100, init_precision=300.0)
        plain_loop(model, optimizer, divisor)
        found.append(torch.cat([optimizer.state[p]["curvature"].flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-12)


def test_a_factor_that_is_no_number_of_micro_batches_belongs_to_the_loss():
    for divisor in (1, 2, 3):
        model = network()
        expected, optimizer = of_all_examples(model), noiseless(model)
        plain_loop(model, optimizer, divisor)
        scaled = {name: value / divisor**2 for name, value in expected.items()}
        assert curvature_error(model, optimizer, scaled) < 1e-7


def test_two_passes_of_half_a_squared_error_keep_the_half():
    """½ (y - f)² as a product is the likelihood's; the gradients of its two passes add up."""
    x, y = data()
    found = []
    for parts in (1, 2):
        model = network()
        optimizer = noiseless(model)
        for inputs, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
            with optimizer.sampled_params():
                (0.5 * F.mse_loss(model(inputs)[:, 0], targets.double())).backward()
        optimizer.step()
        found.append(torch.cat([optimizer.state[p]["curvature"].flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-12)


def test_the_k_samples_of_each_micro_batch_are_averaged():
    model, plain = network(), network()
    optimizer = VOGN(model, base=sgd(model), num_data=100, relative_noise=1e-30, mc_samples=3)
    expected = of_all_examples(model)
    for x, y in batches():
        for sample in range(3):
            with optimizer.sampled_params(sample):
                (F.cross_entropy(model(x), y) / BATCHES).backward()
    optimizer.step()
    plain_loop(plain, sgd(plain), BATCHES)
    assert distance(model, plain) < 1e-7
    assert curvature_error(model, optimizer, expected) < 1e-7


@pytest.mark.filterwarnings("ignore:The loss does not show how it reduces")
def test_sums_divided_by_the_number_of_all_examples_are_measured_as_their_mean():
    model, plain = network(), network()
    optimizer, base = noiseless(model), sgd(plain)
    expected = of_all_examples(model)
    for each, stepper in ((model, optimizer), (plain, base)):
        for x, y in batches():
            with passes(stepper):
                (F.cross_entropy(each(x), y, reduction="sum") / (BATCHES * SIZE)).backward()
        stepper.step()
    assert distance(model, plain) < 1e-7
    assert curvature_error(model, optimizer, expected) < 1e-7
