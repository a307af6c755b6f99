"""Any arguments: refused by name, or training ends with finite numbers and the weights at the mean."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from fuzz_settings import fuzz
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_training import Classifier, assert_same_bits, loader, quiet_trainer, weights

import lightning_bayes
from lightning_bayes.errors import BayesError, HyperparameterError, NonFiniteError
from lightning_bayes.optim.groups import state_of

NAMES = [
    "VOGN",
    "Vadam",
    "IVON",
    "NoisyAdam",
    "NoisyKFAC",
    "KFAC",
    "BBB",
    "VON",
    "MomentumVON",
    "OGN",
    "Vprop",
    "VadaGrad",
]
CALLBACKS = {name: getattr(lightning_bayes, f"{name}Callback") for name in NAMES}

plausible = st.floats(1e-4, 10.0)
numbers = st.one_of(
    plausible,
    plausible,
    st.floats(-1e38, 1e38),
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    st.integers(-2, 10**6),
    st.sampled_from([0, 0.0, -0.0, 1, 1e-38, 1e-30, 1e12, 1e12, 1e30, 1e38, 1e300, True]),
)
counts = st.one_of(st.integers(1, 3), st.integers(-2, 3), st.sampled_from([0, 1.0, 2.5, float("nan"), float("inf")]))
maybe = {
    "lr": st.one_of(st.none(), plausible, st.sampled_from([0, 1e3, 1e12, 1e15, -1.0, float("nan"), float("inf")])),
    "mc_samples": counts,
    "eval_samples": counts,
    "prior_precision": st.none() | numbers,
    "prior_mean": st.sampled_from(["zero", "initial", "initial", "other"]),
    "kl_weight": numbers,
    "kl_warmup_steps": counts,
    "kl_warmup_init": numbers,
    "data_augmentation_factor": numbers,
    "damping": numbers,
    "init_precision": st.none() | numbers,
    "betas": st.one_of(
        st.tuples(st.floats(0, 0.99), st.floats(0, 0.999)), st.tuples(numbers, numbers), st.tuples(plausible), plausible
    ),
    "num_data": st.none() | counts | st.just(48),
    "engine": st.sampled_from(["fused", "fused", "backpack", "other"]),
    "relative_noise": st.none() | numbers,
    "max_noise": st.none() | numbers,
    "damping_in_noise": st.booleans(),
    "bayesian": st.sampled_from([None, None, "weight$", "^net.2", "nothing", "("]),
    "seed": st.integers(0, 2**32),
    "max_nonfinite_steps": counts,
}


@st.composite
def some_arguments(draw):
    """Up to four arguments; with all of them at once every example would be refused."""
    chosen = draw(st.lists(st.sampled_from(sorted(maybe)), max_size=4, unique=True))
    return {name: draw(maybe[name]) for name in chosen}


def finite(tree):
    if isinstance(tree, dict):
        return all(finite(value) for value in tree.values())
    return not isinstance(tree, torch.Tensor) or bool(tree.isfinite().all())


def attempt(call):
    """The result, and in words why there is none; other errors than the package's own are not caught."""
    try:
        return call(), ""
    except BayesError as error:
        return None, str(error)


@fuzz(40, 1000, name=st.sampled_from(NAMES), arguments=some_arguments())
def test_arguments_are_refused_by_name_or_train(name, arguments):
    module, built = Classifier(), CALLBACKS[name]
    before = weights(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callback, refusal = attempt(lambda: built(**arguments))
        if callback is None:
            assert any(argument in refusal for argument in arguments), refusal
            return
        trainer = quiet_trainer(callback, max_epochs=2, limit_train_batches=2)
        _, failure = attempt(lambda: trainer.fit(module, loader()))
    if "left non-finite weights or state" in failure:  # an update overflowed: noticed before anything could use it
        return
    assert all(value.isfinite().all() for value in weights(module).values()), arguments
    if callback.optimizer is None or not callback.optimizer.num_updates:
        assert_same_bits(weights(module), before)
        return
    assert callback.optimizer.stashed_means() == {}
    assert finite(state_of(callback.optimizer.state_dict())), arguments
    if callback.optimizer_class.noisy and name not in ("NoisyKFAC",):
        posterior = callback.optimizer.posterior()
        for parameter, precision in posterior.precision.items():
            assert bool((precision > 0).all()), (parameter, arguments)
        assert_same_bits(posterior.mean, {n: v for n, v in weights(module).items() if n in posterior.mean})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"betas": 0.9}, r"betas=0\.9 must be two numbers"),
        ({"eval_samples": math.inf}, "eval_samples=inf must be a whole number of at least 0"),
        ({"mc_samples": 1.0}, r"mc_samples=1\.0 must be a whole number of at least 1"),
        ({"kl_weight": 1e30}, r"kl_weight=1e\+30 must be at most 1e\+12"),
        ({"lr": 1e15, "damping": 1e13}, r"lr=1000000000000000\.0 must be at most 1e\+12; damping=1.* must be"),
        ({"prior_precision": 1e38}, r"prior_precision=1e\+38 must be at most 1e\+30"),
        (
            {"prior_precision": 1e12, "kl_weight": 1e6, "num_data": 100},
            r"kl_weight=1e\+06 times prior_precision=1e\+12 is 1e\+16 per example with num_data=100, but must be at most",
        ),
    ],
)
def test_what_fuzzing_has_found_is_refused(arguments, message):
    with pytest.raises(HyperparameterError, match=message):
        lightning_bayes.VOGNCallback(**arguments)


def test_a_prior_too_strong_for_the_data_is_refused_once_their_number_is_known():
    callback = lightning_bayes.VOGNCallback(prior_precision=1e12, kl_weight=1e6)
    with pytest.raises(HyperparameterError, match=r"is 2\.08e\+16 per example with num_data=48"):
        quiet_trainer(callback).fit(Classifier(), loader())


def fit_overflowing(*callbacks, **options):
    """Each update multiplies the weights by 1e24."""
    callback = lightning_bayes.VOGNCallback(lr=1e12, prior_precision=1e-30, num_data=48)
    module = Classifier(lambda m: torch.optim.AdamW(m.parameters(), weight_decay=1e27))
    quiet_trainer(callback, *callbacks, **options).fit(module, loader())


@pytest.mark.parametrize("updates", [2, 6])
def test_an_update_that_overflows_is_noticed_at_the_end_or_by_the_next_pass(updates):
    with pytest.raises(
        NonFiniteError, match=r"Update 2 or an earlier one left .* net\.0\.weight.* smaller lr \(1000000000000"
    ):
        fit_overflowing(max_steps=updates)


def test_a_checkpoint_of_overflowed_weights_is_not_written(tmp_path):
    every = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(NonFiniteError, match="Update 2 or an earlier one left"):
        fit_overflowing(every, enable_checkpointing=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step=1.ckpt"]
