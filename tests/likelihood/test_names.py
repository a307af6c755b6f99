"""Combining outputs over samples against direct averages of probabilities."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Bernoulli, Categorical

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.likelihood import as_dict, find_kind

F64 = torch.float64


@pytest.fixture
def outputs(generator):
    return 3 * torch.randn(6, 5, 4, generator=generator, dtype=F64)  # [S, B, C]


def test_softmax_gives_the_log_of_the_mean_probability(outputs):
    probs = torch.stack([each.softmax(-1) for each in outputs]).mean(0)
    torch.testing.assert_close(find_kind("softmax").combine(outputs), probs.log())
    targets = torch.tensor([0, 1, 2, 3, 0])
    torch.testing.assert_close(
        F.cross_entropy(find_kind("softmax").combine(outputs), targets), F.nll_loss(probs.log(), targets)
    )
    logits_averaged = outputs.mean(0).softmax(-1)
    assert not torch.allclose(find_kind("softmax").combine(outputs).softmax(-1), logits_averaged, atol=1e-3)


def test_softmax_over_classes_before_pixels(generator):
    outputs = torch.randn(6, 5, 4, 2, 3, generator=generator, dtype=F64)
    torch.testing.assert_close(find_kind("softmax").combine(outputs), outputs.softmax(2).mean(0).log())
    prediction = find_kind("softmax").summarise(outputs)
    total = Categorical(probs=outputs.softmax(2).mean(0).movedim(1, -1)).entropy()
    within = Categorical(logits=outputs.movedim(2, -1)).entropy().mean(0)
    torch.testing.assert_close(prediction.entropy, total)
    torch.testing.assert_close(prediction.mutual_information, total - within)


def test_sigmoid_gives_the_logit_of_the_mean(outputs):
    torch.testing.assert_close(find_kind("sigmoid").combine(outputs), outputs.sigmoid().mean(0).logit())


def test_identity_gives_the_mean(outputs):
    torch.testing.assert_close(find_kind("identity").combine(outputs), outputs.mean(0))


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_confident_samples_do_not_overflow(link):
    """Probability 1 in one of two float32 samples and 0 in the other averages to ½."""
    outputs = torch.tensor([[[500.0, -500.0]], [[-500.0, 500.0]]])
    combined = find_kind(link).combine(outputs)
    assert combined.isfinite().all()
    probs = combined.softmax(-1) if link == "softmax" else combined.sigmoid()
    torch.testing.assert_close(probs, torch.full((1, 2), 0.5))


def test_one_sample_is_itself(outputs):
    torch.testing.assert_close(find_kind("softmax").combine(outputs[:1]), outputs[0].log_softmax(-1))
    torch.testing.assert_close(find_kind("sigmoid").combine(outputs[:1]), outputs[0])
    torch.testing.assert_close(find_kind("identity").combine(outputs[:1]), outputs[0])


def test_summary_of_classes(outputs):
    prediction = find_kind("softmax").summarise(outputs)
    torch.testing.assert_close(prediction.sample_probs, outputs.softmax(-1))
    torch.testing.assert_close(prediction.probs, outputs.softmax(-1).mean(0))
    total = Categorical(probs=prediction.probs).entropy()
    torch.testing.assert_close(prediction.entropy, total)
    torch.testing.assert_close(prediction.mutual_information, total - Categorical(logits=outputs).entropy().mean(0))


def test_summary_of_bernoullis(outputs):
    prediction = find_kind("sigmoid").summarise(outputs)
    torch.testing.assert_close(prediction.probs, outputs.sigmoid().mean(0))
    total = Bernoulli(probs=prediction.probs).entropy()
    torch.testing.assert_close(prediction.entropy, total)
    torch.testing.assert_close(prediction.mutual_information, total - Bernoulli(logits=outputs).entropy().mean(0))


def test_summary_of_values(outputs):
    moments = find_kind("identity").summarise(outputs)
    torch.testing.assert_close(moments.mean, outputs.mean(0))
    torch.testing.assert_close(moments.variance, outputs.square().mean(0) - outputs.mean(0).square())
    assert moments.samples is outputs


def test_the_dictionary_excludes_the_samples(outputs):
    assert set(as_dict(find_kind("softmax").summarise(outputs))) == {"probs", "entropy", "mutual_information"}
    assert set(as_dict(find_kind("identity").summarise(outputs))) == {"mean", "variance"}


@pytest.mark.parametrize("method", ["combine", "summarise"])
@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1)])
def test_softmax_without_two_classes_is_refused(method, shape):
    """The softmax of one value is always 1, so a regression would silently predict a constant."""
    message = r"needs .*at least two classes, got \[6, 5.*link='binary'; for values, link='regression'"
    with pytest.raises(ShapeError, match=message):
        getattr(find_kind("softmax"), method)(torch.zeros(shape))


@pytest.mark.parametrize(
    ("name", "link"),
    [("classification", "softmax"), ("multilabel", "sigmoid"), ("regression", "identity"), ("poisson", "exp")],
)
def test_likelihoods_and_links_have_the_same_names(name, link):
    assert find_kind(name).state() == find_kind(link).state()


def test_an_unknown_name_lists_the_words_and_the_nearest():
    with pytest.raises(
        HyperparameterError, match=r"link='sigmoidal' is unknown. Did you mean 'sigmoid'\? Use 'classif"
    ):
        find_kind("sigmoidal")


@pytest.mark.parametrize("function", [lambda kind, f: kind.combine(f), lambda kind, f: kind.summarise(f).probs])
def test_classes_may_be_in_the_last_dimension(generator, function):
    tokens = torch.randn(6, 5, 7, 4, generator=generator, dtype=F64)  # [S, B, T, C]
    moved = function(find_kind("softmax"), tokens.movedim(-1, 2))
    torch.testing.assert_close(function(find_kind("softmax_last"), tokens), moved.movedim(1, -1))
