"""Resuming under another setting is refused, with the saved and the new value; the table stands in `optim.resuming`."""

from __future__ import annotations

import pytest
import torch
from tiny_training import Classifier, loader, quiet_trainer, two_groups
from torch.optim import SGD, AdamW

from lightning_bayes import VOGN, IVONCallback, NoisyKFACCallback, OGNCallback, VadamCallback, VOGNCallback
from lightning_bayes.errors import PosteriorError

CHANGES = {
    "Vadam": (VadamCallback, {}, None, r"the algorithm \(saved: VOGN; now: Vadam\)"),
    "IVON": (IVONCallback, {}, None, r"the algorithm \(saved: VOGN; now: IVON\)"),
    "Noisy K-FAC": (NoisyKFACCallback, {}, None, r"the algorithm \(saved: VOGN; now: NoisyKFAC\)"),
    "OGN": (OGNCallback, {}, None, r"the algorithm \(saved: VOGN; now: OGN\)"),
    "the paper's step": (VOGNCallback, {"lr": 0.1}, None, r"the step \(saved: user; now: natural\)"),
    "bayesian=": (
        VOGNCallback,
        {"bayesian": r"^net\.2\."},
        None,
        r"with a posterior \(saved: 4, with net\.0\.bias, net\.0\.weight",
    ),
    "SGD": (VOGNCallback, {}, lambda m: SGD(m.parameters(), 0.01), r"moves the mean \(saved: AdamW; now: SGD\)"),
    "groups": (VOGNCallback, {}, lambda m: AdamW(two_groups(m)), r"the parameter groups \(saved: net\.0\.weight"),
}


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.parametrize(("callback", "arguments", "configure", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_another_setting_is_refused_with_both_names(callback, arguments, configure, message, tmp_path):
    trainer = quiet_trainer(VOGNCallback())
    trainer.fit(Classifier(), loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    module = Classifier() if configure is None else Classifier(configure)
    with pytest.raises(PosteriorError, match=message):
        quiet_trainer(callback(**arguments), max_epochs=2).fit(module, loader(), ckpt_path=tmp_path / "last.ckpt")


def test_a_state_of_another_format_is_refused_by_its_number():
    optimizer = torch.optim.Adam((model := torch.nn.Linear(2, 1)).parameters())
    noisy = VOGN(model, base=optimizer, num_data=4)
    with pytest.raises(PosteriorError, match="has format 1, and this version reads format 3"):
        noisy.load_state_dict({**noisy.state_dict(), "format": 1})
