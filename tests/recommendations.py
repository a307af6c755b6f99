"""What the package advises, and the modules that get the advice: each case says a message, then takes what it recommends.

`CASES` holds what is run here. `ELSEWHERE` names the tests that run the rest, such as those of several processes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from recommended_files import FILES
from tiny_training import (
    EXAMPLES,
    FEATURES,
    Classifier,
    NormedClassifier,
    ValidatedClassifier,
    loader,
    mlp,
    quiet_trainer,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_bayes
from lightning_bayes import (
    IVON,
    KFAC,
    VOGN,
    BlockTridiagonalKFAC,
    Calibration,
    DeepEnsembleCallback,
    IVONCallback,
    KFACCallback,
    LaplaceCallback,
    MCDropoutCallback,
    MeanField,
    MultiModeCallback,
    NNGFull,
    NoisyAdam,
    NoisyKFAC,
    OGNCallback,
    SWAGCallback,
    VadaGrad,
    VOGNCallback,
    VONCallback,
    Vprop,
    calibrate,
    export,
    laplace,
    mc_predict,
    measure,
    posteriors,
)
from lightning_bayes.likelihood import Categorical, OutputLikelihood, Raw
from lightning_bayes.likelihood.names import find_kind
from lightning_bayes.predictive import LinearizedSamples, MemberSamples, PosteriorSamples, recalibrate

ROOT = Path(__file__).parents[1]
ROOMS = ("lightning_bayes", "callbacks", "zoo")
_METHODS = "|".join(sorted((name for name in lightning_bayes.__all__ if name[0].isupper()), key=len, reverse=True))
METHOD = re.compile(rf"\b({_METHODS}|load_posterior|create_model|calibrate|mc_predict)\b|lightning-bayes [a-z]+ ")
ARGUMENT = re.compile(r"\b[a-z_]+=(\"\w+\"|'[\w-]+'|\d[\w.-]*|True|False|\[|\.\.\.|,| |$)")
ADVICE = re.compile(  # an imperative, at the start of a clause
    r"(?:^|[,;:(] |\bor |\band |\{\})(?:avoid|build|call|choose|define|fit|freeze|keep|leave|let|lower|make|omit|pass|"
    r"predict|put|raise|read|remove|replace|resume|return|run|score|set|state|store|take|test|train|use|write)\b"
    r"|\bskips this",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?<=[.:;]) ")


def messages() -> Iterator[tuple[str, str]]:
    """The strings of the package that are no docstrings, each with its file."""
    files = {path.resolve() for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    for path in sorted(files):
        for text in _literals(ast.parse(path.read_text("utf-8"))):
            yield str(path.relative_to(ROOT)), text


def advises(text: str) -> bool:
    """Whether a message advises a method or the value of an argument."""
    return any(is_advice(sentence) for sentence in _SENTENCE.split(text))


def is_advice(sentence: str) -> bool:
    """Whether a sentence tells what to do, and names a method or an argument with a value."""
    return " " in sentence and bool(ADVICE.search(sentence) and (METHOD.search(sentence) or ARGUMENT.search(sentence)))


def _literals(tree: ast.AST) -> Iterator[str]:
    """All strings but docstrings; an expression in an f-string is ``{}``."""
    parts: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            parts.add(node.body[0].value)  # type: ignore[attr-defined]
        if node in parts:
            continue
        if isinstance(node, ast.JoinedStr):
            parts |= {*ast.walk(node)}
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


class Case(NamedTuple):
    """An action that gets the advice, and those that take it."""

    given: Callable[[], object]
    taken: tuple[Callable[[], object], ...]


def case(given: Callable[[], object], *taken: Callable[[], object]) -> Case:
    return Case(given, taken)


# -- what users have ---------------------------------------------------------------------------------------------------

X = torch.linspace(-1, 1, EXAMPLES * FEATURES).reshape(EXAMPLES, FEATURES).sin()
Y = torch.arange(EXAMPLES) % 3
REGRESSION = DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), 8)


def trains(
    module: Callable[[], nn.Module],
    *callbacks: Callable[[], object],
    data=None,
    val=None,
    tested=False,
    predicted=False,
    **options,
):
    """A fit, and a test after it."""

    def run() -> None:
        trained, trainer = module(), quiet_trainer(*(make() for make in callbacks), **options)
        trainer.fit(trained, data or loader(), val)
        if tested:
            trainer.test(trained, loader(), verbose=False)
        if predicted:
            trainer.predict(trained, loader())

    return run


def updates(
    make: Callable[[nn.Module], object], net: Callable[[], nn.Module] = mlp, loss=None, x=X, y=Y, count: int = 2
):
    """Updates of an optimizer in plain PyTorch."""

    def run() -> object:
        torch.manual_seed(0)
        model = net()
        optimizer = make(model)
        for _ in range(count):
            with optimizer.sampled_params():
                (loss or F.cross_entropy)(model(x), y).backward()
            optimizer.step()
        return optimizer

    return run


def regression(outputs: int = 1) -> Classifier:
    return Classifier(net=nn.Linear(FEATURES, outputs), loss=F.mse_loss)


def absolute() -> Classifier:
    return Classifier(net=nn.Linear(FEATURES, 1), loss=F.l1_loss)


class DictsInValidation(Classifier):
    def validation_step(self, batch, batch_idx):
        self(batch["x"])


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ByHand(Manual):
    """Follows the advice: an optimizer of its own."""

    def configure_optimizers(self):
        return VOGN(self, lr=1e-2, num_data=EXAMPLES)

    def training_step(self, batch, batch_idx):
        opt = self.optimizers().optimizer
        with opt.sampled_params():
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        opt.step()


class TwoHeads(Classifier):
    """A class and a value of the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.net(x), self.other(x)

    def training_step(self, batch, batch_idx):
        logits, values = self(batch[0])
        return F.cross_entropy(logits, batch[1]) + F.mse_loss(values, batch[0][:, :1])


class TwoTargets(Classifier):
    """One output that two targets score."""

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        return F.cross_entropy(logits, batch[1]) + F.cross_entropy(logits, (batch[1] + 1) % 3)


class Focal(Classifier):
    def training_step(self, batch, batch_idx):
        log_p = -F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        return -((1 - log_p.exp()) ** 2 * log_p).mean()


class Embedded(Classifier):
    """A table of rows that a linear layer reads."""

    def __init__(self, configure, sparse: bool) -> None:
        super().__init__(configure, nn.Sequential(nn.Embedding(8, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 3)))


TOKENS = DataLoader(TensorDataset(torch.arange(2 * EXAMPLES).reshape(-1, 2) % 8, Y), 8)


def without_rate(module: nn.Module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    return optimizer


def cycled(cycle_momentum: bool) -> Callable[[], Classifier]:
    def configure(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=cycle_momentum)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return lambda: Classifier(configure)


def decayed(module: nn.Module):
    return torch.optim.SGD(module.parameters(), lr=1e-2, weight_decay=1e3)


class Writing(Classifier):
    def predict_step(self, batch, batch_idx):
        probs = self(batch[0]).softmax(-1)
        torch.save(probs, "probs.pt")
        return probs


class Tested(ValidatedClassifier):
    def test_step(self, batch, batch_idx):
        self(batch[0])


class NormedDicts(NormedClassifier):
    """Inputs that the training step puts together."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(torch.cat([batch["left"], batch["right"]], 1)), batch["y"])


HALVED = DataLoader([{"left": x[:2], "right": x[2:], "y": y} for x, y in zip(X, Y, strict=True)], 8)
ODD = DataLoader([{"x": X, "other": torch.zeros(3)}], batch_size=None)
DICTS = DataLoader([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)], 8)


class Reentrant(nn.Module):
    """Positions that all examples share, below activation checkpointing."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.tokens, self.positions, self.use_reentrant = nn.Linear(1, 6), nn.Embedding(FEATURES, 6), use_reentrant
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        below = self.tokens(x.unsqueeze(-1)) + self.positions(torch.arange(FEATURES))
        return self.head(checkpoint(self.inner, below, use_reentrant=self.use_reentrant).tanh().mean(1))


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)

    def forward(self, x):
        return self.head(self.inner(self.inner(x).tanh()))


class Positioned(nn.Module):
    """Two linear layers, each at two positions of an example."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.inner(x.reshape(-1, 2, 2))).mean(1)


class Bypassed(Classifier):
    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch[0]), batch[1])


class Auxiliary(Classifier):
    """A term of the loss that does not come from forward."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(FEATURES, 3)

    def training_step(self, batch, batch_idx):
        return self.loss(self(batch[0]), batch[1]) + self.loss(self.aux(batch[0]), batch[1])


class Borrowed(nn.Module):
    """A layer whose weight is used outside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)

    def forward(self, x):
        return self.head(F.linear(x, self.inner.weight))


class Mixing(nn.Module):
    """A layer of the nodes of a graph, whose rows are not the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.node, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, 3)

    def forward(self, x):
        nodes = self.node(x)
        return self.head(nodes + nodes.roll(1, 0))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(8, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.LayerNorm(6), nn.Linear(6, 3))


def tokens() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 3), nn.Flatten(), nn.Linear(6, 3))


class NoForwardMode(nn.Module):
    """A network whose activation has no forward-mode derivative."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)

    def forward(self, x):
        return self.Double.apply(self.layer(x))


def sgd(module: nn.Module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def of(model: nn.Module) -> MeanField:
    mean = {name: param.detach() for name, param in model.named_parameters()}
    return MeanField(mean, {n: torch.full_like(v, 1e3) for n, v in mean.items()}, dict.fromkeys(mean, 1.0), EXAMPLES)


class BypassedTest(Tested):
    def test_step(self, batch, batch_idx):
        self.net(batch[0])


class WithLoader(Tested):
    def train_dataloader(self):
        return loader()


class Data(LightningDataModule):
    def train_dataloader(self):
        return loader()

    test_dataloader = train_dataloader


class OneByOne(Classifier):
    """A network that sees every feature of an example by itself."""

    def __init__(self) -> None:
        super().__init__(net=nn.Linear(1, 3))

    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch[0].flatten()[:, None]), batch[1].repeat_interleave(FEATURES))


class ManualWithLoader(ByHand):
    def train_dataloader(self):
        return loader()

    def test_step(self, batch, batch_idx):
        self(batch[0])


class OfDicts(Classifier):
    def training_step(self, batch, batch_idx):
        return self.loss(self(batch["x"]), batch["y"])


WHOLE = DataLoader(TensorDataset(X[None], Y[None]), batch_size=None)


def trained(module: Callable[[], nn.Module], *callbacks: object, epochs: int = 4) -> nn.Module:
    found = module()
    quiet_trainer(*callbacks, max_epochs=epochs).fit(found, loader())
    return found


def evaluated(make: Callable[[], object], after_fit: bool = False):
    """A test of a network that the callback has not fitted."""

    def run() -> None:
        trainer = quiet_trainer(make(), max_epochs=4)
        if after_fit:
            trainer.fit(Tested(), loader())
        trainer.test(Tested(), loader(), verbose=False)

    return run


def restored(make: Callable[[], object]):
    """A test of the checkpoint of a fit."""

    def run() -> None:
        trainer = quiet_trainer(make(), max_epochs=4)
        trainer.fit(Tested(), loader())
        trainer.save_checkpoint("last.ckpt")
        quiet_trainer(make()).test(Tested(), loader(), ckpt_path="last.ckpt", verbose=False)

    return run


def of_dictionaries() -> None:
    """Laplace with what a fit has recorded."""
    callback = VOGNCallback()
    module = OfDicts()
    quiet_trainer(callback).fit(module, DICTS)
    laplace(module, DICTS, callback.optimizer.posterior().likelihood, require_trained=False)


NAMED = {"classification": Y, "binary": (X > 0).float(), "counts": (X > 0).float()}
AT_LAPLACE = {
    "classification": Y,
    "multilabel": (X[:, :3] > 0).float(),
    "regression": X[:, :3],
    "counts": (X[:, :3] > 0).float(),
}
HALVES = DataLoader(TensorDataset(X.bfloat16(), Y), 8)


class Own(Categorical):
    """A kind that a user writes, with a curvature and without draws."""

    sample = OutputLikelihood.sample


def batch_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def expansion():
    """A network, its linearised samples, and a batch for BatchNorm."""
    model = batch_normed()
    return model, LinearizedSamples(PosteriorSamples(of(model), 2, 0)), [lambda: model(X)]


def members():
    """A network, two members, and a batch for BatchNorm."""
    model = batch_normed()
    return model, MemberSamples([dict(batch_normed().state_dict()) for _ in range(2)]), [lambda: model(X)]


def penalised(use_reentrant: bool) -> None:
    """An update under a loss with a term that no example has, on a layer below activation checkpointing."""
    inner, head = nn.Linear(FEATURES, 6), nn.Linear(6, 3)
    optimizer = VOGN(nn.Sequential(inner, head), lr=0.1, num_data=EXAMPLES)
    for _ in range(2):
        with optimizer.sampled_params():
            hidden = checkpoint(inner, X.clone().requires_grad_(), use_reentrant=use_reentrant)
            (F.cross_entropy(head(hidden), Y) + inner.weight.square().sum()).backward()
        optimizer.step()


def tied() -> nn.Module:
    layers = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)
    layers[1].weight = layers[0].weight
    return nn.Sequential(*layers)


def jitted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Linear(FEATURES, 6)), nn.Linear(6, 3))


def measured(quantity: str, net: Callable[[], nn.Module] = mlp, loss=F.cross_entropy, **options: object):
    """A measurement of one batch."""

    def run() -> object:
        model = net()
        return measure(model, lambda: loss(model(X), Y), quantity, **options)

    return run


def fitted_laplace(net: Callable[[], nn.Module] = mlp, batches=None, **options: object):
    """Laplace of a network that is trained a little."""

    def run() -> object:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
        return laplace(model, batches or [(X, Y)], **{"likelihood": "classification", **options})

    return run


def prior(kind: str):
    """A posterior as the prior of the next fit."""
    found = fitted_laplace(structure="full", subset="all")().posterior
    return found if kind == "full" else posteriors.marginals(found, found.mean)


def by_hand(outputs, targets):
    """A cross-entropy that does not call torch's."""
    return (outputs.logsumexp(1) - outputs.gather(1, targets[:, None])[:, 0]).mean()


def unreduced(outputs, targets):
    """A loss that does not show how it reduces examples."""
    return torch.stack([F.cross_entropy(o, t) for o, t in zip(outputs, targets, strict=True)]).square().mean().sqrt()


CASES: dict[str, Case] = {
    # callbacks
    "calibrate=False skips this": case(
        trains(lambda: ValidatedClassifier(loss=by_hand), VOGNCallback, val=loader()),
        trains(lambda: ValidatedClassifier(loss=by_hand), partial(VOGNCallback, calibrate=False), val=loader()),
    ),
    "chooses on rows of validation batches, but those of": case(
        trains(DictsInValidation, Calibration, val=ODD),
        trains(ValidatedClassifier, Calibration, val=loader()),
        lambda: calibrate(mlp(), of(mlp()), loader(), 2, link="classification"),
    ),
    "Build the optimizer yourself": case(trains(Manual, VOGNCallback), trains(ByHand)),
    "chooses the length of each step": case(
        trains(lambda: Classifier(without_rate), VOGNCallback),
        trains(lambda: Classifier(lambda m: torch.optim.SGD(m.parameters(), lr=1e-3)), VOGNCallback),
        trains(lambda: Classifier(lambda m: torch.optim.Adafactor(m.parameters())), VOGNCallback),
    ),
    "SparseAdam needs sparse gradients": case(
        trains(
            lambda: Embedded(lambda m: torch.optim.SparseAdam(m.net[0].parameters()), True), VOGNCallback, data=TOKENS
        ),
        *(
            trains(lambda kind=kind: Embedded(lambda m: kind(m.parameters()), False), VOGNCallback, data=TOKENS)
            for kind in (torch.optim.Adam, torch.optim.AdamW)
        ),
    ),
    "or leave it out of bayesian=": case(
        trains(lambda: Embedded(sgd, True), VOGNCallback, data=TOKENS),
        trains(lambda: Embedded(sgd, False), VOGNCallback, data=TOKENS),
        trains(lambda: Embedded(sgd, True), partial(VOGNCallback, bayesian=r"^net\.2"), data=TOKENS),
    ),
    "cycles need a number": case(
        trains(lambda: Classifier(without_rate), MultiModeCallback, max_epochs=2),
        trains(lambda: Classifier(lambda m: torch.optim.SGD(m.parameters(), lr=1e-3)), MultiModeCallback, max_epochs=2),
    ),
    "trains plain networks": case(
        partial(DeepEnsembleCallback, 2, samples=3), partial(DeepEnsembleCallback, 2, samples=0)
    ),
    "Omit step='user'": case(partial(VOGNCallback, step="user", lr=0.1), partial(VOGNCallback, lr=0.1)),
    "does not tell{}. Pass likelihood='classification'": case(
        trains(lambda: Classifier(loss=by_hand), LaplaceCallback),
        trains(lambda: Classifier(loss=by_hand), partial(LaplaceCallback, likelihood="classification")),
    ),
    "to fit the posterior of the likelihood alone": case(
        trains(Focal, LaplaceCallback),
        trains(Focal, partial(LaplaceCallback, likelihood="classification")),
        trains(Focal, VOGNCallback),
        trains(Focal, SWAGCallback, max_epochs=4),
        trains(Focal, partial(DeepEnsembleCallback, 2)),
    ),
    "pass p=0.1 and layers=": case(
        trains(Classifier, MCDropoutCallback),
        trains(Classifier, partial(MCDropoutCallback, p=0.1, layers=r"^net\.1$")),
        trains(lambda: Classifier(net=nn.Sequential(nn.Dropout(0.1), nn.Linear(FEATURES, 3))), MCDropoutCallback),
    ),
    "Pass linearized=False to the variational callback": case(
        trains(
            Tested, partial(VOGNCallback, linearized=True), MultiModeCallback, max_epochs=4, tested=True, val=loader()
        ),
        trains(
            Tested,
            partial(VOGNCallback, linearized=False),
            MultiModeCallback,
            Calibration,
            max_epochs=4,
            tested=True,
            val=loader(),
        ),
    ),
    "for a weaker prior": case(
        trains(lambda: Classifier(decayed), VOGNCallback),
        trains(lambda: Classifier(decayed), partial(VOGNCallback, prior_precision=1.0)),
    ),
    "cycle_momentum=False to the scheduler": case(
        trains(cycled(True), partial(IVONCallback, lr=0.1)), trains(cycled(False), partial(IVONCallback, lr=0.1))
    ),
    "replace this callback by LaplaceCallback(subset='all')": case(
        trains(regression, VOGNCallback, data=REGRESSION),
        trains(regression, partial(LaplaceCallback, subset="all"), data=REGRESSION),
    ),
    "replace this callback by DeepEnsembleCallback(5)": case(
        trains(absolute, VOGNCallback, data=REGRESSION),
        trains(absolute, partial(DeepEnsembleCallback, 5), data=REGRESSION),
    ),
    "use DeepEnsembleCallback(5)": case(
        trains(ValidatedClassifier, partial(VOGNCallback, relative_noise=1e-6), val=loader()),
        trains(ValidatedClassifier, partial(DeepEnsembleCallback, 5), val=loader()),
    ),
    "which keeps the statistics of training": case(
        trains(NormedDicts, SWAGCallback, data=HALVED, max_epochs=4), trains(NormedDicts, VOGNCallback, data=HALVED)
    ),
    # curvature
    "which supports more layers": case(
        updates(
            partial(
                KFAC, lr=0.1, num_data=EXAMPLES, factors="kfra", engine="backpack", unsupported_layers="mean_field"
            ),
            normed,
        ),
        updates(
            partial(
                KFAC, lr=0.1, num_data=EXAMPLES, factors="kfac", engine="backpack", unsupported_layers="mean_field"
            ),
            normed,
        ),
    ),
    "Or use VOGN or IVON": case(
        measured("kfac", Borrowed),
        *(updates(partial(kind, lr=0.1, num_data=EXAMPLES), Borrowed) for kind in (VOGN, IVON)),
    ),
    "Or use IVON or SWAG": case(
        measured("squared_gradients", Mixing),
        updates(partial(IVON, lr=0.1, num_data=EXAMPLES), Mixing),
        trains(lambda: Classifier(net=Mixing()), SWAGCallback, max_epochs=4),
    ),
    "Use engine='fused'": case(
        updates(partial(KFAC, lr=0.1, num_data=EXAMPLES, engine="backpack"), tokens),
        updates(partial(KFAC, lr=0.1, num_data=EXAMPLES, engine="fused"), tokens),
    ),
    "to torch.utils.checkpoint (gradient": case(
        updates(partial(VOGN, lr=0.1, num_data=EXAMPLES), lambda: Reentrant(True)),
        updates(partial(VOGN, lr=0.1, num_data=EXAMPLES), lambda: Reentrant(False)),
    ),
    "to state it": case(
        trains(lambda: Classifier(loss=unreduced), VOGNCallback),
        *(trains(lambda: Classifier(loss=unreduced), partial(VOGNCallback, loss_reduction=r)) for r in ("mean", "sum")),
    ),
    "so it may be a mean or a sum over them": case(
        measured("squared_gradients", loss=unreduced),
        *(measured("squared_gradients", loss=unreduced, loss_reduction=r) for r in ("mean", "sum")),
        measured("squared_gradients", loss=lambda o, y: F.cross_entropy(o, y, reduction="none").mean()),
    ),
    "does not measure {}; pass engine='backpack'": case(
        measured("diag_hessian", engine="fused"), measured("diag_hessian", engine="backpack")
    ),
    "so no hook tells which layer is last": case(fitted_laplace(jitted), fitted_laplace(jitted, subset="^1")),
    # optimizers
    "or use NoisyKFAC or VOGN": case(
        updates(partial(BlockTridiagonalKFAC, lr=0.1, num_data=EXAMPLES, fisher="empirical"), tied),
        updates(partial(NoisyKFAC, lr=0.1, num_data=EXAMPLES), tied),
        updates(partial(VOGN, lr=0.1, num_data=EXAMPLES), tied),
    ),
    "Use NoisyKFAC for such layers": case(
        updates(partial(BlockTridiagonalKFAC, lr=0.1, num_data=EXAMPLES, fisher="empirical"), Positioned),
        updates(partial(NoisyKFAC, lr=0.1, num_data=EXAMPLES), Positioned),
    ),
    "Use scaling='mean', or VOGN": case(
        updates(partial(Vprop, lr=0.1, num_data=4 * EXAMPLES, scaling="sum")),
        updates(partial(Vprop, lr=0.1, num_data=4 * EXAMPLES, scaling="mean")),
        updates(partial(VOGN, lr=0.1, num_data=4 * EXAMPLES)),
    ),
    "Use smaller batches, or VOGN": case(
        updates(partial(NoisyAdam, lr=0.1, num_data=EXAMPLES), count=3),
        updates(partial(NoisyAdam, lr=0.1, num_data=EXAMPLES), x=X[:8], y=Y[:8], count=3),
        updates(partial(VOGN, lr=0.1, num_data=EXAMPLES), count=3),
    ),
    "or set rescale_lr=False": case(
        updates(lambda m: IVON(m, base=torch.optim.Adam(m.parameters()), num_data=EXAMPLES, rescale_lr=True)),
        updates(lambda m: IVON(m, lr=0.1, num_data=EXAMPLES, rescale_lr=True)),
        updates(lambda m: IVON(m, base=torch.optim.Adam(m.parameters()), num_data=EXAMPLES, rescale_lr=False)),
    ),
    "Leave kl_weight=1 and kl_warmup_steps=0": case(
        updates(partial(VadaGrad, lr=0.1, num_data=EXAMPLES, kl_weight=0.5)),
        updates(partial(VadaGrad, lr=0.1, num_data=EXAMPLES, temperature=0.5)),
        updates(partial(VadaGrad, lr=0.1, num_data=EXAMPLES, temperature=lambda step: 1 / (1 + step))),
    ),
    "requires a likelihood that can be sampled": case(
        updates(partial(KFAC, lr=0.1, num_data=EXAMPLES, fisher="sampled")),
        updates(partial(KFAC, lr=0.1, num_data=EXAMPLES, fisher="sampled", likelihood=Categorical())),
        updates(partial(KFAC, lr=0.1, num_data=EXAMPLES, fisher="empirical")),
    ),
    "engine='fused' does not measure {}": case(
        updates(partial(KFAC, lr=0.1, num_data=EXAMPLES, factors="kfra", engine="fused")),
        updates(partial(KFAC, lr=0.1, num_data=EXAMPLES, factors="kfra", engine="backpack")),
    ),
    "BackPACK has no factors for": case(
        updates(partial(KFAC, lr=0.1, num_data=EXAMPLES, engine="backpack"), normed),
        *(
            updates(partial(KFAC, lr=0.1, num_data=EXAMPLES, engine="backpack", unsupported_layers=u), normed)
            for u in ("mean_field", "fused")
        ),
        updates(partial(KFAC, lr=0.1, num_data=EXAMPLES, engine="fused"), normed),
    ),
    "Leave curvature_interval=1": case(
        updates(partial(IVON, lr=0.1, num_data=EXAMPLES, curvature_interval=2)),
        updates(partial(IVON, lr=0.1, num_data=EXAMPLES, curvature_interval=1)),
    ),
    "per-weight precisions do not form": case(
        updates(lambda m: NoisyKFAC(m, lr=0.1, num_data=EXAMPLES, prior=prior("diagonal"))),
        updates(lambda m: NoisyKFAC(m, lr=0.1, num_data=EXAMPLES, prior_precision=1.0, prior_mean="initial")),
        updates(lambda m: VOGN(m, lr=0.1, num_data=EXAMPLES, prior=prior("diagonal"))),
    ),
    "which has no precision for each weight": case(
        updates(lambda m: VOGN(m, lr=0.1, num_data=EXAMPLES, prior=prior("full"))),
        updates(lambda m: VOGN(m, lr=0.1, num_data=EXAMPLES, prior=prior("diagonal"))),
    ),
    "Use MatrixGaussian instead": case(
        updates(partial(BlockTridiagonalKFAC, lr=0.1, num_data=EXAMPLES), convolutional),
        updates(partial(NoisyKFAC, lr=0.1, num_data=EXAMPLES), convolutional),
    ),
    # Laplace and predictions
    "chooses one number. Use prior_structure='scalar'": case(
        fitted_laplace(prior_precision="validation", validation=[(X, Y)], prior_structure="layerwise"),
        fitted_laplace(prior_precision="validation", validation=[(X, Y)], prior_structure="scalar"),
        fitted_laplace(prior_precision="marglik", prior_structure="layerwise"),
    ),
    "Pass subset='last_layer', subset='all'": case(
        fitted_laplace(subset="head"), *(fitted_laplace(subset=s) for s in ("last_layer", "all", r"^2\."))
    ),
    "takes it as it is": case(
        lambda: laplace(mlp(), [(X, Y)], likelihood="classification"),
        lambda: laplace(mlp(), [(X, Y)], likelihood="classification", require_trained=False),
        fitted_laplace(),
    ),
    "does not tell how outputs become predictions, so the raw": case(
        lambda: mc_predict(mlp(), of(mlp()), X, samples=2),
        *(
            partial(mc_predict, mlp(), of(mlp()), X, samples=2, link=k)
            for k in ("classification", "binary", "regression", "counts")
        ),
    ),
    "Predict with sampled weights (linearized=False)": case(
        lambda: mc_predict(NoForwardMode(), of(NoForwardMode()), X, samples=2, link="classification", linearized=True),
        lambda: mc_predict(NoForwardMode(), of(NoForwardMode()), X, samples=2, link="classification", linearized=False),
    ),
    "Pass predict_once=True to run any step so": case(
        trains(Writing, VOGNCallback, predicted=True),
        trains(Writing, partial(VOGNCallback, predict_once=True), predicted=True),
    ),
    "use engine='fused'": case(
        updates(partial(KFAC, lr=0.1, num_data=EXAMPLES, engine="backpack"), Twice),
        updates(partial(KFAC, lr=0.1, num_data=EXAMPLES, engine="fused"), Twice),
    ),
    "'squared_gradients' in measure, VOGN, or hessian": case(
        measured("diag_hessian", Twice, engine="backpack"),
        measured("squared_gradients", Twice),
        updates(partial(VOGN, lr=0.1, num_data=EXAMPLES), Twice),
        trains(
            lambda: Classifier(net=Twice()),
            partial(VONCallback, lr=0.1, hessian="reparameterised", prior_precision=1.0),
        ),
    ),
    "so no labels can be sampled": case(
        trains(Bypassed, partial(KFACCallback, lr=0.1, fisher="sampled", likelihood=Categorical())),
        trains(Classifier, partial(KFACCallback, lr=0.1, fisher="sampled", likelihood=Categorical())),
        trains(Bypassed, partial(KFACCallback, lr=0.1, fisher="empirical")),
    ),
    "Sampled labels cannot measure": case(
        trains(Auxiliary, partial(KFACCallback, lr=0.1, fisher="sampled", likelihood=Categorical())),
        trains(Auxiliary, partial(KFACCallback, lr=0.1, fisher="empirical")),
    ),
    "Use reduction='mean' or 'sum'": case(
        measured("diag_ggn", loss=partial(F.cross_entropy, reduction="none"), engine="backpack"),
        *(measured("diag_ggn", loss=partial(F.cross_entropy, reduction=r), engine="backpack") for r in ("mean", "sum")),
    ),
    "are lost to rounding. Store them in float32": case(
        trains(lambda: Classifier(net=mlp().bfloat16()), VOGNCallback, data=HALVES),
        trains(Classifier, VOGNCallback, precision="bf16-mixed"),
    ),
    "For one logit per label, use link='binary'": case(
        lambda: mc_predict(nn.Linear(FEATURES, 1), of(nn.Linear(FEATURES, 1)), X, samples=2, link="classification"),
        *(
            partial(mc_predict, nn.Linear(FEATURES, 1), of(nn.Linear(FEATURES, 1)), X, samples=2, link=k)
            for k in ("binary", "regression")
        ),
    ),
    "The distribution of the targets is not known{}. Pass": case(
        lambda: Raw().log_prob(X, Y),
        *(partial(lambda k, y: find_kind(k, "link").log_prob(X, y), k, y) for k, y in NAMED.items()),
    ),
    "The likelihood of the targets is not known{}. Pass likelihood=": case(
        fitted_laplace(likelihood=Raw()),
        *(fitted_laplace(batches=[(X, y)], likelihood=k, require_trained=False) for k, y in AT_LAPLACE.items()),
    ),
    "Score each output with one loss function, or use VOGNCallback or SWAGCallback": case(
        trains(TwoTargets, LaplaceCallback),
        trains(Classifier, LaplaceCallback),
        trains(TwoTargets, VOGNCallback),
        trains(TwoTargets, SWAGCallback, max_epochs=4),
    ),
    "Choose it with Calibration(linearized=False)": case(
        lambda: export(mlp(), posteriors.ScaledPosterior(of(mlp()), 2.0, True), "net.pt2", X, link="classification"),
        trains(
            ValidatedClassifier,
            partial(VOGNCallback, eval_samples=2),
            partial(Calibration, linearized=False),
            val=loader(),
        ),
        lambda: export(mlp(), posteriors.ScaledPosterior(of(mlp()), 2.0, False), "net.pt2", X, link="classification"),
    ),
    "have no mean to estimate statistics at. Use of='sample'": case(
        lambda: recalibrate(*members(), of="mean"), lambda: recalibrate(*members(), of="sample")
    ),
    "cannot use separate statistics. Use of='mean'": case(
        lambda: recalibrate(*expansion(), of="sample"), lambda: recalibrate(*expansion(), of="mean")
    ),
    "cannot draw targets. Use curvature='ggn'": case(
        fitted_laplace(likelihood=Own(), curvature="fisher", require_trained=False),
        *(fitted_laplace(likelihood=Own(), curvature=k, require_trained=False) for k in ("ggn", "empirical_fisher")),
    ),
    # what an evaluation needs
    **{
        hint: case(
            trains(BypassedTest, *make, tested=True, max_epochs=4, val=loader()),
            trains(Tested, *make, tested=True, max_epochs=4, val=loader()),
            trains(BypassedTest, *without, tested=True, max_epochs=4, val=loader()),
        )
        for hint, make, without in (
            ("set eval_samples=0", [VOGNCallback], [partial(VOGNCallback, eval_samples=0)]),
            ("remove MultiModeCallback", [MultiModeCallback], []),
            ("remove Calibration", [Calibration], []),
            ("remove DeepEnsembleCallback", [partial(DeepEnsembleCallback, 2)], []),
        )
    },
    **{
        said: case(evaluated(make, **options), restored(make))
        for said, make, options in (
            ("no posterior was trained or loaded. Pass ckpt_path=", VOGNCallback, {}),
            ("they are not the mean of its posterior. Pass ckpt_path=", VOGNCallback, {"after_fit": True}),
            (
                "which are not those of its last fit. Pass ckpt_path=",
                partial(DeepEnsembleCallback, 2),
                {"after_fit": True},
            ),
            ("no mode was found or loaded. Pass ckpt_path=", MultiModeCallback, {}),
            ("which are not a mean of collected ones. Pass ckpt_path=", SWAGCallback, {}),
            ("has trained no networks. Fit first, or pass ckpt_path=", partial(DeepEnsembleCallback, 2), {}),
        )
    },
    "Pass datamodule=..., define train_dataloader": case(
        lambda: quiet_trainer(LaplaceCallback()).test(Tested(), loader(), verbose=False),
        lambda: quiet_trainer(LaplaceCallback()).test(trained(WithLoader), loader(), verbose=False),
        lambda: quiet_trainer(LaplaceCallback()).test(trained(Tested), datamodule=Data(), verbose=False),
        trains(Tested, LaplaceCallback, tested=True),
    ),
    # the data and the likelihood
    "Pass num_data=... to the callback": case(
        trains(Classifier, VOGNCallback, data=WHOLE),
        trains(Classifier, partial(VOGNCallback, num_data=EXAMPLES), data=WHOLE),
    ),
    "or pass num_data=..., the number of examples": case(
        trains(OneByOne, VOGNCallback),
        trains(OneByOne, partial(VOGNCallback, num_data=FEATURES * EXAMPLES)),
        trains(Classifier, VOGNCallback),
    ),
    "to use the loss's, or state the likelihood": case(
        trains(Classifier, partial(VOGNCallback, link="regression")), trains(Classifier, VOGNCallback)
    ),
    "is one, but the training loss scores several": case(
        trains(TwoHeads, partial(VOGNCallback, link="classification")), trains(TwoHeads, VOGNCallback)
    ),
    "Let it yield pairs (inputs, targets) of tensors, or batches as in": case(
        fitted_laplace(batches=[{"x": X, "y": Y}], require_trained=False),
        fitted_laplace(batches=[(X, Y)], require_trained=False),
        of_dictionaries,
    ),
    "also updates the weights. Take the loss": case(
        lambda: quiet_trainer(LaplaceCallback()).test(ManualWithLoader(), loader(), verbose=False),
        lambda: quiet_trainer(LaplaceCallback(likelihood="classification")).test(
            trained(ManualWithLoader), loader(), verbose=False
        ),
    ),
    "backward under checkpoint(..., use_reentrant=True) can run only once": case(
        partial(penalised, True),
        partial(penalised, False),
    ),
    "Or train without LaplaceCallback": case(trains(Focal, LaplaceCallback), trains(Focal)),
    "Pass a loader as validation=": case(
        fitted_laplace(prior_precision="validation"), fitted_laplace(prior_precision="validation", validation=[(X, Y)])
    ),
    "or pass prior_precision= as a number": case(
        trains(ValidatedClassifier, LaplaceCallback, val=loader(), max_epochs=4),
        trains(ValidatedClassifier, partial(LaplaceCallback, prior_precision=1.0), val=loader(), max_epochs=4),
    ),
    # steps
    "Pass lr=... to the callback, or return Adam": case(
        trains(lambda: Classifier(lambda m: torch.optim.Rprop(m.parameters())), OGNCallback),
        trains(lambda: Classifier(lambda m: torch.optim.Rprop(m.parameters())), partial(OGNCallback, lr=0.1)),
        trains(Classifier, OGNCallback),
    ),
    "or omit step: the user's optimizer": case(
        partial(VOGNCallback, step="natural"), partial(VOGNCallback, step="natural", lr=0.1), VOGNCallback
    ),
    "Pass that optimizer as base=..., or leave both out": case(
        updates(partial(VOGN, num_data=EXAMPLES, step_rule="user")),
        updates(lambda m: VOGN(m, base=torch.optim.Adam(m.parameters()), num_data=EXAMPLES)),
        updates(partial(VOGN, num_data=EXAMPLES, lr=0.1)),
    ),
    "Train it first, or pass init_precision=": case(
        lambda: NNGFull(mlp(), likelihood=Categorical(), num_data=EXAMPLES, prior_precision=1.0).posterior(),
        lambda: NNGFull(
            mlp(), likelihood=Categorical(), num_data=EXAMPLES, prior_precision=1.0, init_precision=100.0
        ).posterior(),
        lambda: updates(
            partial(NNGFull, likelihood=Categorical(), num_data=EXAMPLES, prior_precision=1.0)
        )().posterior(),
    ),
    **{key: Case(*actions) for key, actions in FILES.items()},
}


ELSEWHERE: dict[str, str] = {
    "and pass ckpt_path='best', or the path of one": "test_the_checkpoint_of_a_forked_fit_holds_the_posterior",
    "Resume the fit with ckpt_path=": "test_a_resumed_fit_trains_only_the_members_that_are_missing",
    "or pass required=False": "test_a_module_that_hides_its_logits_is_refused_unless_figures_are_not_required",
    "Pass --model.num_classes=3": "test_the_class_folders_are_counted_and_the_config_says_the_number",
    "Set download=True": "test_downloads_only_if_allowed",
    "or use noise='fixed'": "test_learned_noise_rejects_data_without_a_length",
    'predict = Predictor.load("{}"': "test_the_code_on_the_card_runs",
    "show the arguments of a class": "test_help_of_a_callback_documents_every_argument",
    "Use one device, strategy='ddp'": "test_ranks_are_identical_bit_for_bit",
    "Keep whole parameters in each process": "test_ranks_are_identical_bit_for_bit",
    "run lightning-bayes laplace --trainer.devices=1": "test_a_trained_checkpoint_gets_a_laplace_posterior",
    "Free space or choose another directory": "test_a_full_disk_is_named_and_leaves_the_last_checkpoint_whole",
    "Free space, and resume the fit": "test_a_resumed_fit_trains_only_the_members_that_are_missing",
    "trains the members in one process": "test_the_documented_commands_train_and_evaluate_an_ensemble",
}
