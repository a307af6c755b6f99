"""Twenty modules as users write them: nothing in them knows of this package.

Each entry of `MODULES` builds a module, a data set of whole batches, and says what the loss takes: a dimension of classes,
``"sigmoid"``, ``"rate"`` or ``"mean"`` by path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, Normal, Weibull

from lightning_bayes.predictive import Quantiles

B = 8
LEVELS = (0.1, 0.5, 0.9)


class User(NamedTuple):
    """One user's case."""

    module: Callable[[], LightningModule]
    batches: Callable[[], list[Any]]
    takes: dict[tuple[Any, ...], Any]  # what the loss takes, by the path in forward's output
    link: Any = None  # stated, where the loss is written by hand


class Module(LightningModule):
    """Steps of the tutorial: `loss` of the batch, logged in validation and test."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        return F.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch), batch_size=B)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


def mlp(out: int, features: int = 4) -> tuple[nn.Module, ...]:
    return nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, out)


def draws(*makers: Callable[[torch.Generator], Any], as_dict: tuple[str, ...] = ()) -> Callable[[], list[Any]]:
    """Three batches of tensors drawn by `makers`."""

    def batches() -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        rows = [[make(generator) for make in makers] for _ in range(3)]
        return [dict(zip(as_dict, row, strict=True)) if as_dict else row for row in rows]

    return batches


def normal(*shape: int) -> Callable[[torch.Generator], Any]:
    return lambda g: torch.randn(B, *shape, generator=g)


def whole(high: int, *shape: int, low: int = 0) -> Callable[[torch.Generator], Any]:
    return lambda g: torch.randint(low, high, (B, *shape), generator=g)


def ignored(high: int, value: int, *shape: int) -> Callable[[torch.Generator], Any]:
    """Class indices, a third of which do not count."""

    def make(g):
        target = torch.randint(0, high, (B, *shape), generator=g)
        return target.masked_fill(torch.rand(target.shape, generator=g) < 0.3, value)

    return make


# -- transformers ---------------------------------------------------------------------------------------------------------


class HuggingFace(Module):
    """``self(**batch)`` and ``outputs.loss``."""

    def __init__(self, model):
        super().__init__()
        self.net = model

    def forward(self, **batch):
        return self.net(**batch)

    def loss(self, batch):
        return self(**batch).loss


def bert(name):
    import transformers

    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    return HuggingFace(getattr(transformers, name)(config))


def t5():
    import transformers

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=20, decoder_start_token_id=0, use_cache=False, **sizes)
    return HuggingFace(transformers.T5ForConditionalGeneration(config))


# -- several outputs ------------------------------------------------------------------------------------------------------


class TwoHeads(Module):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.Tanh())
        self.classes, self.value = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x):
        features = self.net(x)
        return self.classes(features), self.value(features)

    def loss(self, batch):
        logits, value = self(batch[0])
        return F.cross_entropy(logits, batch[1]) + F.mse_loss(value, batch[2])


class Table(Module):
    """Several tasks with missing values."""

    def loss(self, batch):
        output, target = self(batch[0]), batch[1]
        known = ~target.isnan()
        return F.mse_loss(output[known], target[known])


class Detection(Module):
    """Boxes whose number the network decides, beside the scores that it learns."""

    def forward(self, x):
        scores = self.net(x)
        kept = scores[:, 0] > scores[:, 0].median()
        return {"scores": scores, "boxes": x[kept]}

    def loss(self, batch):
        return F.binary_cross_entropy_with_logits(self(batch[0])["scores"], batch[1])


class TwoInputs(Module):
    def __init__(self):
        super().__init__(*mlp(3, 6))

    def forward(self, x, z):
        return self.net(torch.cat([x, z], 1))

    def loss(self, batch):
        x, z, y = batch
        return F.cross_entropy(self(x, z), y)

    def predict_step(self, batch, batch_idx):
        return {"probs": self(batch[0], batch[1]).softmax(-1)}


class Variance(Module):
    def forward(self, x):
        mean, log_variance = self.net(x).chunk(2, -1)
        return {"mean": mean, "log_variance": log_variance}

    def loss(self, batch):
        output = self(batch[0])
        return F.gaussian_nll_loss(output["mean"], batch[1], output["log_variance"].exp())

    def predict_step(self, batch, batch_idx):
        output = self(batch[0])
        return {"price": 100 + 20 * output["mean"], "noise": 20 * (output["log_variance"] / 2).exp()}


# -- one output, in other units -------------------------------------------------------------------------------------------


class Segmentation(Module):
    def __init__(self):
        super().__init__(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))

    def loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1], ignore_index=255)

    def predict_step(self, batch, batch_idx):
        probs = self(batch[0]).softmax(1)
        return {"mask": probs.argmax(1), "area": probs.mean((2, 3))}


class KeyPoints(Module):
    """Heat maps, whose soft argmax is the point that is predicted and learned."""

    def __init__(self):
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))

    def points(self, x):
        grid = torch.linspace(0, 1, x.shape[-1])
        maps = self(x).flatten(2).softmax(-1).view(len(x), 2, *x.shape[-2:])
        return torch.stack([(maps.sum(2) * grid).sum(-1), (maps.sum(3) * grid).sum(-1)], -1)

    def loss(self, batch):
        return F.mse_loss(self.points(batch[0]), batch[1])

    def predict_step(self, batch, batch_idx):
        return {"points": 64 * self.points(batch[0])}


class Standardised(Module):
    def loss(self, batch):
        return F.mse_loss(self(batch[0]), (batch[1] - 5) / 3)

    def predict_step(self, batch, batch_idx):
        return {"mean": self(batch[0]) * 3 + 5}


class Counts(Module):
    def loss(self, batch):
        return F.poisson_nll_loss(self(batch[0]), batch[1].float())

    def predict_step(self, batch, batch_idx):
        return {"visits_per_year": 365 * self(batch[0]).exp()}


class Pinball(Module):
    def loss(self, batch):
        error = batch[1] - self(batch[0])
        levels = torch.tensor(LEVELS)
        return torch.maximum(levels * error, (levels - 1) * error).mean()


class Speech(Module):
    """CTC: outputs are ``[T, B, C]``."""

    def forward(self, x):
        return self.net(x).log_softmax(-1).transpose(0, 1)

    def loss(self, batch):
        x, y = batch
        lengths = torch.full((len(x),), x.shape[1]), torch.full((len(x),), y.shape[1])
        return F.ctc_loss(self(x), y, *lengths)

    def predict_step(self, batch, batch_idx):
        return {"frames": self(batch[0]).exp().transpose(0, 1)}


class Survival(Module):
    """Times of which some are censored: the log-likelihood of a Weibull distribution."""

    def loss(self, batch):
        x, time, is_event = batch
        law = weibull(self(x))
        log_survival = -((time / law.scale) ** law.concentration)
        return -torch.where(is_event > 0, law.log_prob(time), log_survival).mean()

    def predict_step(self, batch, batch_idx):
        law = weibull(self(batch[0]))
        return {"median": law.scale * 0.6931 ** (1 / law.concentration)}


def weibull(output):
    return Weibull(output[:, 0].exp(), F.softplus(output[:, 1]) + 0.5)


def mixture(output):
    weight, mean, log_std = output.chunk(3, -1)
    return MixtureSameFamily(Categorical(logits=weight), Normal(mean, log_std.exp()))


class Mixture(Module):
    def loss(self, batch):
        return -mixture(self(batch[0])).log_prob(batch[1][:, 0]).mean()


class Labels(Module):
    def loss(self, batch):
        return F.binary_cross_entropy_with_logits(self(batch[0]), batch[1].float(), pos_weight=torch.tensor([1.0, 3.0]))


class Language(Module):
    """Next tokens; outputs are ``[B, T, C]``."""

    def __init__(self):
        super().__init__(nn.Embedding(12, 8), nn.Linear(8, 12))

    def loss(self, batch):
        tokens = batch[0]
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def predict_step(self, batch, batch_idx):
        return {"next": self(batch[0])[:, -1].softmax(-1)}


class AutoEncoder(Module):
    def __init__(self):
        super().__init__(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 4))

    def loss(self, batch):
        return F.mse_loss(self(batch[0]), batch[0])

    def predict_step(self, batch, batch_idx):
        return {"anomaly": (self(batch[0]) - batch[0]).square().mean(1)}


class Triplets(Module):
    def loss(self, batch):
        anchor, near, far = (self(x) for x in batch)
        return F.triplet_margin_loss(anchor, near, far)

    def predict_step(self, batch, batch_idx):
        return {"embedding": F.normalize(self(batch[0]))}


TOKENS = {"input_ids": whole(20, 5), "attention_mask": whole(2, 5, low=1)}
image, times = normal(2, 4, 4), (lambda g: torch.rand(B, generator=g) + 0.1)


def missing(g):
    target = torch.randn(B, 3, generator=g)
    return target.masked_fill(torch.rand(B, 3, generator=g) < 0.3, float("nan"))


def text(labels):
    return draws(*TOKENS.values(), labels, as_dict=(*TOKENS, "labels"))


MODULES = {
    "BERT, classes": User(lambda: bert("BertForSequenceClassification"), text(whole(3)), {("logits",): 1}),
    "BERT, tokens": User(lambda: bert("BertForTokenClassification"), text(ignored(3, -100, 5)), {("logits",): -1}),
    "T5": User(t5, text(whole(20, 4)), {("logits",): -1}),
    "two heads": User(TwoHeads, draws(normal(4), whole(3), normal(1)), {(0,): 1, (1,): "mean"}),
    "table with missing values": User(lambda: Table(*mlp(3)), draws(normal(4), missing), {(): "mean"}),
    "detection": User(
        lambda: Detection(*mlp(2)), draws(normal(4), lambda g: whole(2, 2)(g).float()), {("scores",): "sigmoid"}
    ),
    "two inputs": User(TwoInputs, draws(normal(4), normal(2), whole(3)), {(): 1}),
    "mean and variance": User(lambda: Variance(*mlp(2)), draws(normal(4), normal(1)), {}),
    "segmentation": User(Segmentation, draws(image, ignored(3, 255, 4, 4)), {(): 1}),
    "key points": User(KeyPoints, draws(normal(1, 6, 6), lambda g: torch.rand(B, 2, 2, generator=g)), {(): "mean"}),
    "standardised": User(lambda: Standardised(*mlp(1)), draws(normal(4), normal(1)), {(): "mean"}),
    "counts": User(lambda: Counts(*mlp(1)), draws(normal(4), whole(9, 1)), {(): "rate"}),
    "quantiles": User(lambda: Pinball(*mlp(3)), draws(normal(4), normal(1)), {}, Quantiles(LEVELS)),
    "speech": User(lambda: Speech(*mlp(5)), draws(normal(9, 4), whole(5, 3, low=1)), {}),
    "survival": User(lambda: Survival(*mlp(2)), draws(normal(4), times, whole(2)), {}, weibull),
    "mixture density": User(lambda: Mixture(*mlp(6)), draws(normal(4), normal(1)), {}, mixture),
    "labels": User(lambda: Labels(*mlp(2)), draws(normal(4), whole(2, 2)), {(): "sigmoid"}),
    "language": User(Language, draws(whole(12, 6)), {(): -1}),
    "anomalies": User(AutoEncoder, draws(normal(4)), {(): "mean"}),
    "triplets": User(lambda: Triplets(*mlp(3)), draws(normal(4), normal(4), normal(4)), {(): "mean"}),
}
