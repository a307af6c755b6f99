"""The fits: networks, callbacks, and the time and memory of the updates of one fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes import IVONCallback, NoisyKFACCallback, VOGNCallback
from lightning_bayes.zoo import LeNet5, ResNet18

WARM_UP: Final = 10  # updates; the first ten measure the curvature, later one in ten does
START: Final = 5  # batches of the start of a fit
CLASSES: Final = 10
CLOCKS: Final = {"cpu": time.process_time, "wall": time.perf_counter}


def images(rows: int) -> Tensor:
    """Random images, ``[rows, 3, 32, 32]``."""
    return torch.randn(rows, 3, 32, 32)


class Network(NamedTuple):
    """A network, the number of timed updates of a fit, a multiple of ten, and its random inputs."""

    title: str
    build: Callable[[], nn.Module]
    updates: int
    inputs: Callable[[int], Tensor] = images


def mlp(width: int) -> nn.Module:
    """Two hidden layers on 256 features."""
    return nn.Sequential(
        nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


class Tokens(nn.Module):
    """Classifies sequences of tokens by the mean of a table's rows, after `layers`."""

    def __init__(self, rows: int, width: int, *layers: nn.Module) -> None:
        super().__init__()
        self.table, self.layers, self.head = (
            nn.Embedding(rows, width),
            nn.Sequential(*layers),
            nn.Linear(width, CLASSES),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, ``[rows, classes]``."""
        logits: Tensor = self.head(self.layers(self.table(tokens)).mean(1))
        return logits


def transformer() -> nn.Module:
    """Two layers of width 64 over 32 tokens."""
    layers = (nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2))
    return Tokens(1000, 64, *layers)


def vit_tiny() -> nn.Module:
    """Timm's smallest ViT for images of 32 pixels."""
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=CLASSES)


def vit_small() -> nn.Module:
    """Timm's ViT-S for images of 32 pixels."""
    import timm

    return timm.create_model("vit_small_patch16_224", img_size=32, patch_size=4, num_classes=CLASSES)


NETWORKS: Final = {
    "lenet5": Network("LeNet-5", partial(LeNet5, num_classes=CLASSES, in_channels=3, image_size=32), 100),
    "resnet18": Network("ResNet-18", partial(ResNet18, num_classes=CLASSES), 10),
    "vit_small": Network("ViT-S", vit_small, 10),
    "vit_tiny": Network("ViT-Ti", vit_tiny, 10),
    "mlp256": Network("MLP, 256", partial(mlp, 256), 100, lambda rows: torch.randn(rows, 256)),
    "mlp1024": Network("MLP, 1024", partial(mlp, 1024), 50, lambda rows: torch.randn(rows, 256)),
    "transformer": Network("transformer", transformer, 50, lambda rows: torch.randint(1000, (rows, 32))),
    "embedding": Network(
        "50,000 rows", partial(Tokens, 50_000, 64), 20, lambda rows: torch.randint(50_000, (rows, 32))
    ),
}


class Floor(Callback):
    """The least that a noisy method adds: in each batch one `normal_` and one `addcmul_` for each tensor."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Draw a sample that nothing reads."""
        for param in pl_module.parameters():
            mean = param.detach()
            draw = torch.empty_like(mean).normal_()
            draw.addcmul_(mean, mean)


BASELINE: Final = "Adam"
FLOOR: Final = "floor"
METHODS: Final[dict[str, Callable[[], Callback | None]]] = {
    BASELINE: lambda: None,
    FLOOR: Floor,
    "VOGN": VOGNCallback,
    "VOGN, T = 1": partial(VOGNCallback, curvature_interval=1),
    "IVON": IVONCallback,
    "Noisy K-FAC": NoisyKFACCallback,
    "ivon-opt": lambda: None,  # the authors' IVON in a module of its own
}
PRECISIONS: Final = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed"}  # Lightning's names


class Classifier(LightningModule):
    """A user's module: cross-entropy and Adam."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy."""
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam with a small learning rate, because the labels are random."""
        return torch.optim.Adam(self.parameters(), lr=1e-4, fused=self.device.type == "cuda")


class AuthorsIVON(Classifier):
    """The same under ivon-opt, which draws its sample inside a step of its own."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Take one update."""
        optimizer: Any = self.optimizers(use_pl_optimizer=False)  # Lightning's would pass a closure
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
        optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the authors' optimizer."""
        import ivon

        return ivon.IVON(self.parameters(), lr=1e-4, ess=50_000)


class Stopwatch(Callback):
    """Reads the clock at the start of a fit, after its first five batches, after the warm-up and after the last batch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.fit, self.five, self.start, self.end = clock, 0.0, 0.0, 0.0, 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of the first batches."""
        self.fit = self._now()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Read the clock after the first batches, and after the warm-up."""
        if batch_idx == START:
            self.five = self._now()
        if batch_idx == WARM_UP:
            self.start = self._now()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop."""
        self.end = self._now()

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.clock()


class Cost(NamedTuple):
    """Of an update: its mean seconds, the largest memory of the fit on a GPU in MiB, and the seconds of five batches."""

    seconds: float
    mib: float
    start: float


def cost_per_update(
    method: str, network: Network, batch: int, clock: str = "wall", device: str = "cpu", precision: str = "fp32"
) -> Cost:
    """Fit a network on random inputs, and measure the updates after the warm-up."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
    count = batch * (WARM_UP + network.updates)
    data = TensorDataset(network.inputs(count).to(device), torch.randint(CLASSES, (count,), device=device))
    on_gpu = device == "cuda"
    stopwatch = Stopwatch(CLOCKS[clock])
    with quiet():
        options: dict[str, Any] = {"accelerator": "gpu" if on_gpu else "cpu"}
        trainer = quiet_trainer([stopwatch, METHODS[method]()], 1, precision=PRECISIONS[precision], **options)
        module = (AuthorsIVON if method == "ivon-opt" else Classifier)(network.build())
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        trainer.fit(module, DataLoader(data, batch_size=batch))
    mib = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0.0
    return Cost((stopwatch.end - stopwatch.start) / network.updates, mib, stopwatch.five - stopwatch.fit)
