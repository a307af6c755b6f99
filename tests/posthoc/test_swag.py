"""SWAG's moments against a direct computation from all iterates."""

from __future__ import annotations

import pytest
import torch

from lightning_bayes.errors import HyperparameterError, PosteriorError
from lightning_bayes.posthoc import SWAG

SHAPES = {"w": (2, 3), "b": (2,)}


def iterates(generator, count):
    return [
        {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()} for _ in range(count)
    ]


def collected(found, rank):
    swag = SWAG(rank)
    for each in found:
        swag.collect(each)
    return swag


@pytest.mark.parametrize(("count", "rank"), [(7, 3), (3, 5)])
def test_the_covariance_matches_the_paper(generator, count, rank):
    found = iterates(generator, count)
    posterior = collected(found, rank).posterior(10, dict.fromkeys(SHAPES, 1.0))
    kept = min(count, rank)
    for name in SHAPES:
        stacked = torch.stack([each[name] for each in found])
        torch.testing.assert_close(posterior.mean[name], stacked.mean(0))
        torch.testing.assert_close(posterior.diagonal[name], stacked.var(0, correction=0) / 2)
        running = torch.stack([stacked[: t + 1].mean(0) for t in range(count)])
        deviations = (stacked - running)[-kept:] / (2 * (kept - 1)) ** 0.5
        torch.testing.assert_close(posterior.deviations[name], deviations)
        expected = stacked.var(0, correction=0) / 2 + deviations.square().sum(0)
        torch.testing.assert_close(posterior.variance()[name], expected)


def test_moments_resume_from_their_state(generator, tmp_path):
    found = iterates(generator, 6)
    torch.save(collected(found[:4], 3).state_dict(), tmp_path / "state.pt")
    resumed = SWAG(3)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for each in found[4:]:
        resumed.collect(each)
    prior = dict.fromkeys(SHAPES, 1.0)
    one, other = (s.posterior(10, prior).state_dict() for s in (resumed, collected(found, 3)))
    for part in ("mean", "diagonal", "deviations"):
        assert all(torch.equal(one[part][name], other[part][name]) for name in SHAPES)


def test_weights_that_do_not_move_have_the_least_variance():
    swag = collected([{"w": torch.full((2,), 3.0)}] * 3, 2)
    posterior = swag.posterior(10, {"w": 1.0})
    assert torch.isfinite(posterior.log_prob(posterior.sample()))
    torch.testing.assert_close(posterior.sample()["w"], posterior.mean["w"], rtol=1e-4, atol=0)


def test_a_single_iterate_is_refused():
    with pytest.raises(PosteriorError, match=r"SWAG needs at least 2 iterates, but has 1\. Collect earlier"):
        collected([{"w": torch.ones(2)}], 2).posterior(10, {"w": 1.0})
    with pytest.raises(HyperparameterError, match=r"max_rank=1 must be a whole number of at least 2"):
        SWAG(1)
