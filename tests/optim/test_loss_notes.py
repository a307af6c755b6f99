"""What losses have told stands beside the groups' settings, survives a checkpoint, and is read from earlier files."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from tiny_training import loader, mlp

from lightning_bayes import VOGN

EARLIER = {"is_mean": "loss_is_mean", "link": "loss_link", "writes_data": "writes_data", "likelihood": "likelihood"}


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
    del state["notes"]
    other.load_state_dict(state)
    assert vars(other.notes) == vars(opt.notes)
    assert not set(EARLIER.values()) & set(other.param_groups[0]["posterior"])
