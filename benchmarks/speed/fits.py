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
CLOCKS: Final = {"cpu": time.process_time, "wall": time.perf_counter}


class Network(NamedTuple):
    """A network, and the number of timed updates of a fit, a multiple of ten."""

    title: str
    build: Callable[[], nn.Module]
    updates: int


def vit_small() -> nn.Module:
    """Timm's ViT-S for images of 32 pixels."""
    import timm

    return timm.create_model("vit_small_patch16_224", img_size=32, patch_size=4, num_classes=10)


NETWORKS: Final = {
    "lenet5": Network("LeNet-5", partial(LeNet5, num_classes=10, in_channels=3, image_size=32), 100),
    "resnet18": Network("ResNet-18", partial(ResNet18, num_classes=10), 10),
    "vit_small": Network("ViT-S", vit_small, 10),
}
BASELINE: Final = "Adam"
METHODS: Final[dict[str, Callable[[], Callback | None]]] = {
    BASELINE: lambda: None,
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
    """Reads the clock before the first batch after the warm-up and after the last batch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.start, self.end = clock, 0.0, 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start after the warm-up."""
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
    """Of an update: its mean seconds, and the largest memory of the fit on a GPU in MiB."""

    seconds: float
    mib: float


def cost_per_update(
    method: str, network: Network, batch: int, clock: str = "wall", device: str = "cpu", precision: str = "fp32"
) -> Cost:
    """Fit a network on random images, and measure the updates after the warm-up."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
    count = batch * (WARM_UP + network.updates)
    images = TensorDataset(torch.randn(count, 3, 32, 32, device=device), torch.randint(10, (count,), device=device))
    on_gpu = device == "cuda"
    stopwatch = Stopwatch(CLOCKS[clock])
    with quiet():
        options: dict[str, Any] = {"accelerator": "gpu" if on_gpu else "cpu"}
        trainer = quiet_trainer([stopwatch, METHODS[method]()], 1, precision=PRECISIONS[precision], **options)
        module = (AuthorsIVON if method == "ivon-opt" else Classifier)(network.build())
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        trainer.fit(module, DataLoader(images, batch_size=batch))
    mib = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0.0
    return Cost((stopwatch.end - stopwatch.start) / network.updates, mib)
