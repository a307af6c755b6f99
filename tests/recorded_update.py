"""An update whose algorithm proposes given changes and records what a step asks of it."""

from __future__ import annotations

import torch
from torch import nn

from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.hyperparameters import HostSettings, OptimizerFields
from lightning_bayes.optim.settings import declaration_of
from lightning_bayes.optim.steps import CohortUpdate


class RecordedUpdate(CohortUpdate):
    def __init__(self, means, changes, *, grads=None, prior_means=(), index=1):
        self.params = [nn.Parameter(mean, requires_grad=False) for mean in means]
        for param, grad in zip(self.params, grads or [torch.zeros_like(mean) for mean in means], strict=True):
            param.grad = grad
        self.states = [{"step": index, "prior_mean": mean} for mean in prior_means] or [{"step": index} for _ in means]
        self.group = {
            "lr": 1e-3,
            "posterior": {**declaration_of(OptimizerFields, HostSettings).defaults, "num_data": 10},
        }
        self.changes, self.calls = changes, []

    def prior_weights(self):
        return effective({"posterior": {**self.group["posterior"], "step_rule": "user"}}).stated_prior

    def move_(self):
        self.calls.append(("move_",))
        torch._foreach_add_(self.params, self.changes)

    def propose_(self, lr):
        self.calls.append(("propose_", lr))
        return [change.clone() for change in self.changes]

    def average_(self):
        self.calls.append(("average_",))
