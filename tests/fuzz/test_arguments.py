"""Any arguments: refused by name, or training ends with finite numbers and the weights at the mean."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from fuzz_settings import fuzz
from hypothesis import strategies as st
from tiny_training import Classifier, assert_same_bits, loader, quiet_trainer, weights

import lightning_bayes
from lightning_bayes.errors import BayesError, HyperparameterError

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
    st.floats(-1e12, 1e12),  # at 1e20 the squares in the user's Adam overflow in single precision
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    st.integers(-2, 10**6),
    st.sampled_from([0, 0.0, -0.0, 1, 1e-30, 1e12, True]),
)
counts = st.one_of(st.integers(1, 3), st.integers(-2, 3), st.sampled_from([0, 1.0, 2.5, float("nan"), float("inf")]))
maybe = {
    "lr": st.one_of(
        st.none(), plausible, st.sampled_from([0, 1e3, -1.0, float("nan"), float("inf")])
    ),  # 1e9 may diverge
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
        attempt(lambda: trainer.fit(module, loader()))
    assert all(value.isfinite().all() for value in weights(module).values()), arguments
    if callback.optimizer is None or not callback.optimizer.num_updates:
        assert_same_bits(weights(module), before)
        return
    assert callback.optimizer.sampled_mean() == {}
    assert finite(callback.optimizer.state_dict()["state"]), arguments
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
    ],
)
def test_what_fuzzing_has_found_is_refused(arguments, message):
    with pytest.raises(HyperparameterError, match=message):
        lightning_bayes.VOGNCallback(**arguments)
