from __future__ import annotations

import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import entropy as scipy_entropy
from torch.distributions import Categorical

from lightning_bayes.errors import ShapeError
from lightning_bayes.predictive import OOD_SCORES, ood_scores


@pytest.fixture
def samples(generator):
    return 3 * torch.randn(6, 20, 5, generator=generator, dtype=torch.float64)


def test_scores_of_samples_equal_scipy_on_the_average(samples):
    probs, logits = samples.softmax(-1).mean(0).numpy(), samples.mean(0).numpy()
    total = scipy_entropy(probs, axis=-1)
    expected = {
        "entropy": total,
        "max_probability": -probs.max(-1),
        "mutual_information": total - Categorical(logits=samples).entropy().mean(0).numpy(),
        "energy": -logsumexp(logits, axis=-1),
        "max_logit": -logits.max(-1),
    }
    found = ood_scores(samples)
    assert list(found) == list(OOD_SCORES)
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], torch.as_tensor(value), rtol=0, atol=1e-12, msg=name)


def test_logits_without_samples_have_no_mutual_information(samples):
    single = ood_scores(samples[0])
    alone = ood_scores(samples[:1])
    assert set(alone) - set(single) == {"mutual_information"}
    torch.testing.assert_close(alone["mutual_information"], torch.zeros(20, dtype=torch.float64))
    for name, value in single.items():
        assert value.shape == (20,)
        torch.testing.assert_close(value, alone[name])


@pytest.mark.parametrize("name", OOD_SCORES)
def test_disagreeing_samples_score_higher_than_agreeing_samples(name):
    agreeing = torch.tensor([[[9.0, 0.0, 0.0]], [[9.0, 0.0, 0.0]]])
    contradicting = torch.tensor([[[9.0, 0.0, 0.0]], [[0.0, 9.0, 0.0]]])
    assert OOD_SCORES[name](contradicting) > OOD_SCORES[name](agreeing)


def test_energy_and_max_logit_do_not_saturate():
    logits = torch.tensor([[[200.0, 0.0]], [[100.0, 0.0]]]).transpose(0, 1)  # one sample, two inputs
    found = ood_scores(logits)
    assert found["energy"].tolist() == [-200, -100]
    assert found["max_logit"].tolist() == [-200, -100]
    assert found["max_probability"].tolist() == [-1, -1]


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2, 3), (4, 1)])
def test_wrong_shapes_are_refused(shape):
    for name in ("entropy", "max_probability", "energy", "max_logit"):
        with pytest.raises(ShapeError, match=r"of at least two classes, got \["):
            OOD_SCORES[name](torch.zeros(shape))
    with pytest.raises(
        ShapeError, match=r"needs the logits of several samples.*got \[4, 3\]\. It is undefined for a single network"
    ):
        OOD_SCORES["mutual_information"](torch.zeros(4, 3))
