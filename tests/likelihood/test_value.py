"""The value that a fit stores: plain data, and how later passes read batches with it."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lightning_bayes.errors import DataError, PosteriorError
from lightning_bayes.likelihood import Inputs, Likelihood, OutputLikelihood, ScoredOutput, Targets, labels_in
from lightning_bayes.likelihood.paths import entries


class Counted(OutputLikelihood):
    """A kind with a setting."""

    name = "counted_in_a_test"

    def __init__(self, std: float = 1.0) -> None:
        self.std = std

    def log_prob(self, outputs, targets):
        return -((outputs - targets) ** 2) / self.std

    def combine(self, outputs):
        return outputs.mean(0)

    def summarise(self, outputs, interval=0.9):
        raise NotImplementedError


BATCH = {"x": torch.ones(2, 3), "more": [torch.zeros(2, 1)], "labels": torch.tensor([1.0, math.nan])}
INPUTS = Inputs.found((BATCH["x"],), {"z": BATCH["more"][0], "scale": 2.0}, entries(BATCH))
LIKELIHOOD = Likelihood((ScoredOutput((("logits",),), Counted(2.0), Targets(("labels",), math.nan)),), INPUTS)


def forward(x, z, scale=1.0):
    return {"logits": scale * (x.sum(1, keepdim=True) + z)}


def test_the_value_survives_json():
    again = Likelihood.of_state(json.loads(json.dumps(LIKELIHOOD.state())))
    assert math.isnan(again.outputs[0].targets.ignored)
    assert (again.outputs[0].paths, again.outputs[0].kind.std) == ((("logits",),), 2.0)
    assert again.inputs == INPUTS


def test_a_newer_kind_or_format_is_named():
    state = LIKELIHOOD.state()
    with pytest.raises(PosteriorError, match="99"):
        Likelihood.of_state({**state, "format": 99})
    with pytest.raises(PosteriorError, match="'martian'"):
        OutputLikelihood.of_state({"kind": "martian"})


def test_forward_gets_what_the_step_passed():
    args, kwargs = INPUTS.of(BATCH)
    assert args[0] is BATCH["x"]
    assert kwargs["z"] is BATCH["more"][0]
    assert kwargs["scale"] == 2.0


def test_keyword_arguments_that_a_batch_lacks_are_left_out():
    inputs = Inputs.found((), dict(BATCH), entries(BATCH))
    assert inputs.of({"x": BATCH["x"]})[1].keys() == {"x"}


def test_computed_arguments_are_unknown():
    assert Inputs.found((BATCH["x"] + 1,), {}, entries(BATCH)) is None


def test_missing_targets_do_not_count():
    (read,) = labels_in(BATCH, LIKELIHOOD).terms(forward)
    assert read.outputs.tolist() == [[6.0], [6.0]]
    assert read.targets.tolist() == [[1.0], [0.0]]
    assert read.mask.tolist() == [[True], [False]]


def test_targets_that_only_the_step_knows_are_refused():
    scored = ScoredOutput(((),), Counted(), Targets(None))
    with pytest.raises(DataError, match="Only the training step"):
        labels_in(BATCH, Likelihood((scored,), INPUTS))
