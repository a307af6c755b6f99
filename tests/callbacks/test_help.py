"""The help of the callbacks' arguments says what the code does."""

from lightning_bayes.callbacks.fields import CallbackFields
from lightning_bayes.optim.default_noise import (
    FLATNESS_OF_CLASSIFIERS,
    FLATNESS_OF_CONVOLUTIONS,
    NOISE_OF_CLASSIFIERS,
    NOISE_OF_CONVOLUTIONS,
    NOISE_OF_NORMALISED,
    NOISE_OF_REGRESSIONS,
)


def test_the_help_of_relative_noise_and_noise_flatness_states_the_defaults_of_the_code():
    text = " ".join((CallbackFields.__doc__ or "").split())
    assert (
        f"use {NOISE_OF_NORMALISED} with normalisation layers, else {NOISE_OF_CONVOLUTIONS} with convolutions and "
        f"{NOISE_OF_CLASSIFIERS} without; other models use {NOISE_OF_REGRESSIONS}"
    ) in text
    assert f"defaults to {NOISE_OF_CONVOLUTIONS}, {FLATNESS_OF_CONVOLUTIONS:g}; where it" in text
    assert f"defaults to {NOISE_OF_CLASSIFIERS}, {FLATNESS_OF_CLASSIFIERS}." in text
