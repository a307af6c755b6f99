"""What losses have told stands beside the groups' settings, survives a checkpoint, and is read from earlier files."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_training import loader, mlp

from lightning_bayes import VOGN

EARLIER = {"is_mean": "loss_is_mean", "writes_data": "writes_data", "likelihood": "likelihood"}


def optimizer():
    model = mlp()
    return model, VOGN(model, base=torch.optim.Adam(model.parameters(), lr=0.01), num_data=48)


def trained():
    model, opt = optimizer()
    settings = set(opt.param_groups[0]["posterior"])
    for x, y in loader():
        with opt.sampled_params():
            F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    assert set(opt.param_groups[0]["posterior"]) == settings  # an update writes no other key
    return opt


def test_a_state_restores_them():
    opt, (_, other) = trained(), optimizer()
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert vars(other.notes) == vars(opt.notes)
    assert other.notes.is_mean
    assert repr(other.notes.known_likelihood.outputs) == repr(opt.notes.known_likelihood.outputs)


def test_a_state_of_an_earlier_version_restores_them_from_its_first_group():
    opt, (_, other) = trained(), optimizer()
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"][0]["posterior"] |= {key: state["notes"][name] for name, key in EARLIER.items()}
    state["param_groups"][0]["posterior"]["loss_link"] = "softmax"
    del state["notes"]
    other.load_state_dict(state)
    assert vars(other.notes) == vars(opt.notes)
    assert other.notes.classifies
    assert not {*EARLIER.values(), "loss_link"} & set(other.param_groups[0]["posterior"])


@pytest.mark.parametrize(("link", "classifies"), [("sigmoid", True), ("identity", False), (None, False)])
def test_a_state_with_a_link_in_its_notes_restores_whether_it_classifies(link, classifies):
    opt, (_, other) = trained(), optimizer()
    state = copy.deepcopy(opt.state_dict())
    state["notes"] = {"is_mean": True, "link": link}
    other.load_state_dict(state)
    assert other.notes.classifies is classifies
    assert "link" not in other.state_dict()["notes"]
