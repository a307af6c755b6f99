"""A ten-line LightningModule, a learnable problem and a quiet trainer for the tests of the callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

FEATURES, CLASSES, EXAMPLES = 4, 3, 48

# Six batches of eight rows, and what two ranks may have of each.
WHOLE = [list(range(8 * i, 8 * i + 8)) for i in range(6)]
LEFT, RIGHT = [rows[:4] for rows in WHOLE], [rows[4:] for rows in WHOLE]
FEW, MANY = [rows[:2] for rows in WHOLE], [rows[2:] for rows in WHOLE]


def adamw(module: nn.Module) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0)


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases, each with a learning rate of its own; biases do not decay."""
    weights = [p for name, p in module.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in module.named_parameters() if name.endswith("bias")]
    return [
        {"params": weights, "lr": 3e-3, "name": "weights"},
        {"params": biases, "lr": 5e-3, "weight_decay": 0.0, "name": "biases"},
    ]


class Classifier(LightningModule):
    """An ordinary module with any network and loss; `configure` builds its optimizer."""

    def __init__(
        self,
        configure: Callable[[nn.Module], Any] = adamw,
        net: nn.Module | None = None,
        loss: Callable[[Any, Any], torch.Tensor] = F.cross_entropy,
    ) -> None:
        super().__init__()
        self.configure, self.loss = configure, loss
        self.net = net if net is not None else mlp()
        self.training_steps = 0

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.training_steps += 1
        return self.loss(self(x), y)

    def configure_optimizers(self):
        return self.configure(self)


class ValidatedClassifier(Classifier):
    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", self.loss(self(x), y))


class RecordingClassifier(Classifier):
    """Keeps the outputs of its evaluation steps, and logs their loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[torch.Tensor] = []

    def validation_step(self, batch, batch_idx):
        self.seen.append(self(batch[0]))
        self.log("loss", self.loss(self.seen[-1], batch[1]), batch_size=len(batch[0]))

    test_step = validation_step


class NormedClassifier(ValidatedClassifier):
    """A network with BatchNorm, which keeps what its test steps see."""

    def __init__(self) -> None:
        layers = (nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES))
        super().__init__(net=nn.Sequential(*layers))
        self.seen = []

    def test_step(self, batch, batch_idx):
        self.seen.append(self(batch[0]))


def mlp(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def blobs(examples: int = EXAMPLES) -> TensorDataset:
    """Gaussian blobs, one per class, always the same."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(examples) % CLASSES
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=generator)
    return TensorDataset(centres[y] + torch.randn(examples, FEATURES, generator=generator), y)


def loader(batch_size: int | None = 8, examples: int = EXAMPLES, **kwargs: Any) -> DataLoader:
    return DataLoader(blobs(examples), batch_size=batch_size, **kwargs)


class FixedBatches(BatchSampler):
    """Batches of the test's own: Lightning's DistributedSampler shuffles whatever the loader says."""

    def __init__(self, batches: list[list[int]]) -> None:
        super().__init__(SequentialSampler(blobs()), batch_size=8, drop_last=False)
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def fixed_loader(batches: list[list[int]]) -> DataLoader:
    return DataLoader(blobs(), batch_sampler=FixedBatches(batches))


def quiet_trainer(*callbacks: Callback, **kwargs: Any) -> Trainer:
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        "log_every_n_steps": 1,
    }
    return Trainer(callbacks=list(callbacks), **{**quiet, **kwargs})


def fit(module: LightningModule, *callbacks: Callback, data: Any = None, **kwargs: Any) -> Trainer:
    """Train on `data`, by default six batches of eight, and return the trainer."""
    trainer = quiet_trainer(*callbacks, **kwargs)
    trainer.fit(module, loader() if data is None else data)
    return trainer


def groups_after(configure: Callable[[nn.Module], Any], callback: Callback) -> list[dict[str, Any]]:
    """The parameter groups of the callback's optimizer after a fit."""
    fit(Classifier(configure), callback)
    return callback.optimizer.param_groups


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all parameters and buffers."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def flat_state(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """A parameter's optimizer state as tensors, that of the user's optimizer inside included."""
    found = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found |= flat_state(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = torch.as_tensor(value)
    return found


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], **tolerance, msg=lambda m, name=name: f"{name}: {m}")


class LearningRates(Callback):
    """Records the learning rates of every group before each batch."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append([group["lr"] for group in trainer.optimizers[0].param_groups])
