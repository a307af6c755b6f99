"""Mixed precision: the fp32 result within rounding, with the curvature free of the loss scale."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from tiny_training import Classifier, assert_close, fit, weights

from lightning_bayes import LaplaceCallback, VOGNCallback
from lightning_bayes.errors import UnsupportedTrainingError

NATURAL = {"lr": 0.05, "init_precision": 100.0, "mc_samples": 2}


def with_scaler(**kwargs):
    return {"plugins": MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", **kwargs))}


def trained(**trainer):
    module, callback = Classifier(), VOGNCallback(**NATURAL)
    fit(module, callback, max_epochs=2, **trainer)
    names = {param: name for name, param in module.named_parameters()}
    curvature = {names[param]: state["curvature"] for param, state in callback.optimizer.state.items()}
    return weights(module), curvature


@pytest.mark.parametrize(
    ("precision", "relative"),
    [({"precision": "bf16-mixed"}, 0.05), (with_scaler(), 0.01), (with_scaler(init_scale=8.0), 0.01)],
    ids=["bf16-mixed", "16-mixed", "16-mixed_small_scale"],
)
@pytest.mark.parametrize("trainer", [{}, {"accumulate_grad_batches": 4}, {"gradient_clip_val": 0.1}], ids=str)
def test_mixed_precision_gives_the_result_of_full_precision(precision, relative, trainer):
    """Half precision keeps 8 (bf16) or 11 bits; rounding errors add up over twelve steps."""
    mean, curvature = trained(**trainer)
    found_mean, found_curvature = trained(**precision, **trainer)
    assert all(value.dtype == torch.float32 for value in (*found_mean.values(), *found_curvature.values()))
    assert_close(found_mean, mean, rtol=relative, atol=relative)
    assert_close(found_curvature, curvature, rtol=relative, atol=0.1 * relative)
    assert any(not torch.equal(found_mean[name], mean[name]) for name in mean)


def test_double_precision_is_kept_in_weights_and_posterior():
    module, callback = Classifier(), VOGNCallback(**NATURAL)
    fit(module, callback, precision="64-true")
    assert all(param.dtype == torch.float64 for param in module.parameters())
    assert all(value.dtype == torch.float64 for value in callback.optimizer.posterior().precision.values())


def test_overflowing_update_is_skipped_and_training_goes_on():
    """The first loss scale overflows float16; the scaler lowers it and the other five batches train."""
    module, callback = Classifier(), VOGNCallback(**NATURAL)
    trainer = fit(module, callback, **with_scaler(init_scale=2.0**30, backoff_factor=2.0**-16))
    assert trainer.global_step == 6
    assert callback.optimizer.num_updates == 5
    assert all(value.isfinite().all() for value in weights(module).values())
    assert all(state["curvature"].isfinite().all() for state in callback.optimizer.state.values())


@pytest.mark.parametrize("callback", [VOGNCallback, LaplaceCallback])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", "bfloat16"), ("16-true", "float16")])
def test_weights_stored_in_half_precision_are_refused(callback, precision, dtype):
    module = Classifier()
    with pytest.raises(UnsupportedTrainingError, match=rf"stored as torch\.{dtype}.*float32.*bf16-mixed"):
        fit(module, callback(), precision=precision)
    assert module.training_steps == 0
