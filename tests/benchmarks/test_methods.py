from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks.speed import methods
from benchmarks.speed.methods import METHODS, obstacle
from benchmarks.speed.models import MODELS, make_task
from benchmarks.speed.setting import Setting

# Methods whose update is Adam's on the mean gradient, so that their gradient must be Adam's.
SAME_GRADIENT = ["backpack-stock", "torch-func", "example-loop", "opacus"]
LIBRARIES_WARN = pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing", "ignore:Extension saving to .* does not have an extension for Module"
)


def run(name, case, setting, steps=1):
    pytest.importorskip(METHODS[name].module)
    task = make_task(case, 4, setting)
    step = METHODS[name].build(task)
    for _ in range(steps):
        step()
    return task


@LIBRARIES_WARN
@pytest.mark.parametrize("name", METHODS)
def test_every_step_moves_every_parameter(name, tiny, setting):
    start = dict(make_task(tiny, 4, setting).model.named_parameters())
    task = run(name, tiny, setting, steps=2)
    assert all(not torch.equal(p, start[n]) for n, p in task.model.named_parameters())


@LIBRARIES_WARN
@pytest.mark.parametrize("name", SAME_GRADIENT)
def test_per_example_methods_train_on_adams_gradient(name, tiny, setting):
    theirs, adams = (dict(run(n, tiny, setting).model.named_parameters()) for n in (name, "adam"))
    for parameter, expected in adams.items():
        torch.testing.assert_close(theirs[parameter].grad, expected.grad)
    for parameter, expected in adams.items():
        torch.testing.assert_close(theirs[parameter], expected, atol=1e-6, rtol=0)


@LIBRARIES_WARN
def test_stock_backpack_measures_the_squares(tiny, setting):
    task = run("backpack-stock", tiny, setting)
    assert all(p.sum_grad_squared.shape == p.shape for p in task.model.parameters())


@LIBRARIES_WARN
@pytest.mark.parametrize("name", ["adam", "vogn-fused", "ivon", "torch-func"])
def test_runs_in_mixed_precision(name, tiny):
    task = run(name, tiny, Setting(precision="bf16-mixed"))
    with task.autocast():
        assert task.model(task.images).dtype == torch.bfloat16


@LIBRARIES_WARN
@pytest.mark.parametrize("name", ["backpack-stock", "torch-func", "opacus"])
def test_what_is_said_about_batch_norm_is_true(name, tiny_with_batch_norm, setting):
    with pytest.raises((NotImplementedError, RuntimeError)):
        run(name, tiny_with_batch_norm, setting)


@pytest.mark.parametrize("name", ["backpack-stock", "torch-func", "example-loop"])
def test_batch_norm_in_training_mode_is_named_beforehand(name, tiny_with_batch_norm, setting):
    task = make_task(tiny_with_batch_norm, 4, setting)
    reason = obstacle(METHODS[name], task)
    assert re.match(r"BatchNorm in training mode \(1 layers, such as 1\): .+", reason)
    task.model.eval()
    assert obstacle(METHODS[name], task) is None


def test_an_absent_package_is_named_with_its_command(tiny, setting):
    absent = METHODS["ivon"]._replace(module="no_such_module", package="no-such-package")
    assert obstacle(absent, make_task(tiny, 4, setting)) == "absent: pip install no-such-package"


@pytest.mark.parametrize(("free", "refused"), [(2 * 4 * 4 * 297, True), (2 * 4 * 4 * 297 + 1, False), (None, False)])
def test_gradients_that_would_not_fit_are_refused_by_size(free, refused, tiny, setting, monkeypatch):
    monkeypatch.setattr(methods, "available_bytes", lambda device: free)
    task = make_task(tiny, 4, setting)
    assert sum(p.numel() for p in task.model.parameters()) == 297  # 4 examples of 4 bytes each
    reason = obstacle(METHODS["torch-func"], task)
    assert (reason is not None) == refused
    assert not refused or re.match(r"memory: the gradients of all examples take 0\.0 GiB, too much for", reason)
    assert obstacle(METHODS["adam"], task) is None


def test_every_method_starts_from_the_same_weights_and_batch(tiny, setting):
    first, second = (make_task(tiny, 4, setting) for _ in range(2))
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.labels, second.labels)
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["lenet", "alexnet", "resnet18", "resnet18-eval"])
def test_the_benchmarks_networks_take_its_batches(name, setting):
    task = make_task(MODELS[name], 2, setting)
    assert task.loss().isfinite()


def test_the_workspace_limit_reaches_vogn(tiny, monkeypatch):
    seen = {}

    def record(model, **arguments):
        seen.update(arguments)
        return SimpleNamespace(param_groups=[])

    monkeypatch.setattr(methods, "VOGN", record)
    METHODS["vogn-fused"].build(make_task(tiny, 2, Setting(workspace_mib=8.0)))
    assert seen["workspace_mib"] == 8.0
    seen.clear()
    METHODS["vogn-fused"].build(make_task(tiny, 2, Setting()))
    assert "workspace_mib" not in seen
