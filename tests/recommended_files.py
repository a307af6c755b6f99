"""Recommendations about members, checkpoints and posterior files: what gets each, and what follows it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from tiny_training import EXAMPLES, FEATURES, Classifier, RecordingClassifier, loader, mlp, quiet_trainer
from torch import nn

from lightning_bayes import (
    VOGN,
    VON,
    DeepEnsembleCallback,
    Predictor,
    VOGNCallback,
    VONCallback,
    export,
    load_posterior,
    zoo,
)
from lightning_bayes.zoo.create import architecture


class Locked(RecordingClassifier):
    """A module that cannot be copied, and whose constructor has an argument."""

    def __init__(self, classes: int) -> None:
        super().__init__(net=nn.Linear(FEATURES, classes))
        self.lock = threading.Lock()


class Rebuilt(Locked):
    """Follows the advice."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.save_hyperparameters()


class Scaled(RecordingClassifier):
    """A parameter that no layer draws."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, FEATURES + 1))

    def forward(self, x):
        return self.net(self.scale * x)


class Drawn(Scaled):
    """Follows the advice."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class Counting(Callback):
    """A callback that can be copied."""

    batches, guard = 0, None

    def on_train_batch_end(self, *_: object) -> None:
        self.batches += 1


class Guarding(Counting):
    """One that cannot."""

    def __init__(self) -> None:
        self.guard = threading.Lock()


class Tuned(Classifier):
    """Saves its loss among the hyperparameters."""

    ignored: tuple[str, ...] = ()

    def __init__(self, loss: nn.Module | None = None) -> None:
        super().__init__(loss=loss or nn.CrossEntropyLoss())
        self.save_hyperparameters(ignore=self.ignored)


class Ignoring(Tuned):
    """Follows the advice."""

    ignored = ("loss",)


class Branching(nn.Linear):
    """A forward that depends on values."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else -super().forward(x)


class Selecting(nn.Linear):
    """The same function without a branch."""

    def forward(self, x):
        return torch.where(x.sum() > 0, 1, -1) * super().forward(x)


X = torch.randn(EXAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))


def ensemble(module: Callable[[], nn.Module], *callbacks: Callable[[], object], count: int = 2):
    """The fit and the test of an ensemble."""

    def run() -> None:
        trainer, trained = quiet_trainer(DeepEnsembleCallback(count), *(make() for make in callbacks)), module()
        trainer.fit(trained, loader())
        trainer.test(trained, loader(), verbose=False)

    return run


def separate(module: Callable[[], nn.Module]):
    """Networks that are trained one by one, and tested as members."""

    def run() -> None:
        paths = []
        for seed in range(2):
            torch.manual_seed(seed)
            trainer = quiet_trainer()
            trainer.fit(module(), loader())
            trainer.save_checkpoint(paths.append(f"{seed}.ckpt") or paths[-1])
        quiet_trainer(DeepEnsembleCallback(paths)).test(module(), loader(), verbose=False)

    return run


def replaced() -> None:
    """A test after a member was overwritten by another."""
    module, callback = RecordingClassifier(), DeepEnsembleCallback(2)
    trainer = quiet_trainer(callback)
    trainer.fit(module, loader())
    trainer.save_checkpoint("run.ckpt")
    folder = Path(callback.folder)
    shutil.copy(folder / "member_1.ckpt", folder / "member_2.ckpt")
    quiet_trainer(DeepEnsembleCallback(2)).test(module, loader(), ckpt_path="run.ckpt", verbose=False)


def saved(module: Callable[[], nn.Module] = Classifier) -> str:
    """The checkpoint of a fit."""
    trainer = quiet_trainer(VOGNCallback())
    trainer.fit(module(), loader())
    trainer.save_checkpoint("last.ckpt")
    return "last.ckpt"


def trusted() -> None:
    """Load a checkpoint whose types are declared safe."""
    path, before = saved(partial(Tuned, nn.CrossEntropyLoss())), torch.serialization.get_safe_globals()
    try:
        torch.serialization.add_safe_globals([nn.CrossEntropyLoss, set])
        load_posterior(path)
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def resumed() -> None:
    """Resume a fit whose checkpoint holds objects."""
    path = saved(partial(Tuned, nn.CrossEntropyLoss()))
    quiet_trainer(VOGNCallback(), max_epochs=2).fit(
        Tuned(nn.CrossEntropyLoss()), loader(), ckpt_path=path, weights_only=False
    )


def posterior_of(model: nn.Module):
    return VOGN(model, lr=0.1, num_data=EXAMPLES, init_precision=100.0).posterior()


def exported(kind: Callable[[int, int], nn.Module]) -> None:
    model = kind(FEATURES, 3)
    export(model, posterior_of(model), "net.pt2", X[:2], samples=2, link="classification")


def served() -> None:
    model = Branching(FEATURES, 3)
    zoo.save_posterior("net.safetensors", model, posterior_of(model), link="classification")
    Predictor.load("net.safetensors", model=Branching(FEATURES, 3))(X)


def weights_loaded() -> None:
    net = zoo.create_model("mlp", num_classes=3, image_size=2, hidden=(6,))
    torch.save(net.state_dict(), "net.pt")
    zoo.create_model("mlp", num_classes=3, image_size=2, hidden=(6,), pretrained="net.pt")


def under_a_scaler() -> None:
    optimizer = VON(mlp(), lr=0.1, num_data=EXAMPLES)
    with optimizer.sampled_params(loss_scale=8.0):
        pass


def in_full_precision() -> None:
    trainer = quiet_trainer(VONCallback(lr=0.1), precision="32-true")
    trainer.fit(Classifier(loss=F.cross_entropy), loader())


FILES: dict[str, tuple[Callable[[], object], tuple[Callable[[], object], ...]]] = {
    "or the number of networks to train, such as": (
        lambda: quiet_trainer(DeepEnsembleCallback(["nowhere.ckpt", "no.ckpt"])).test(
            RecordingClassifier(), loader(), verbose=False
        ),
        (separate(RecordingClassifier), ensemble(RecordingClassifier, count=5)),
    ),
    "is not the one that the fit has trained": (
        replaced,
        (ensemble(RecordingClassifier), separate(RecordingClassifier)),
    ),
    "build there what it holds": (
        ensemble(partial(Locked, 3)),
        (ensemble(partial(Rebuilt, 3)), separate(partial(Locked, 3))),
    ),
    "cannot start again from fresh weights": (ensemble(Scaled), (ensemble(Drawn), separate(Scaled))),
    "train without the callbacks": (
        ensemble(RecordingClassifier, Guarding),
        (ensemble(RecordingClassifier, Counting), separate(RecordingClassifier)),
    ),
    "no scaled loss, such as that of": (under_a_scaler, (in_full_precision,)),
    "write save_hyperparameters(ignore=": (
        lambda: load_posterior(saved(partial(Tuned, nn.CrossEntropyLoss()))),
        (lambda: load_posterior(saved(partial(Ignoring, nn.CrossEntropyLoss()))), trusted, resumed),
    ),
    "avoid branches on values": (partial(exported, Branching), (partial(exported, Selecting), served)),
    "Build it with zoo.create_model": (
        lambda: architecture(nn.Linear(2, 2)),
        (lambda: architecture(zoo.create_model("mlp", num_classes=3, image_size=2, hidden=(6,))),),
    ),
    "Read a Lightning checkpoint with load_posterior": (
        lambda: zoo.load(saved()),
        (lambda: load_posterior(saved()), weights_loaded),
    ),
}
