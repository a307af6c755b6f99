"""What the prose of README and docs recommends: every advice is followed, and every call and argument in it exists."""

from __future__ import annotations

import inspect
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from recommendations import (
    CASES,
    REGRESSION,
    Mixing,
    X,
    Y,
    fitted_laplace,
    is_advice,
    of,
    regression,
    trains,
    updates,
)
from tiny_training import EXAMPLES, Classifier, mlp
from torch import nn

import lightning_bayes
from lightning_bayes import (
    VOGN,
    IVONCallback,
    LaplaceCallback,
    Predictor,
    VOGNCallback,
    callbacks,
    mc_predict,
    posthoc,
    predictive,
    zoo,
)

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```.*?^```\s*$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_CALL = re.compile(r"[A-Z]\w+\((?![^)]*\.\.\.)[^`]*\)")
_WORD = re.compile(r"([a-z_]+)=\S*")
PEERS = {"Laplace"}  # a class of laplace-torch, in the guide for its users
OF_OTHERS = {  # arguments of torch, Lightning and peers
    *("accumulate_grad_batches", "gradient_accumulation_steps", "hess_init", "inference_mode", "num_groups"),
    *("validation", "weight_decay"),
}
PUBLIC = {
    name: value
    for room in (posthoc, predictive, zoo, callbacks, lightning_bayes)
    for name, value in vars(room).items()
    if not name.startswith("_") and name not in PEERS
}


def prose(page: str) -> str:
    return _FENCE.sub("", (ROOT / page).read_text("utf-8"))


def advices(page: str) -> list[str]:
    """The clauses of a page that tell what to do."""
    paragraphs = re.split(r"\n\s*\n|\n(?=[-|#])", re.sub(r"`|\*\*", "", prose(page)))
    clauses = [clause for text in paragraphs for clause in re.split(r"(?<=[.:;|]) ", " ".join(text.split()))]
    return [clause for clause in clauses if is_advice(clause)]


def frozen() -> Classifier:
    module = Classifier(net=nn.Sequential(Mixing(), nn.Linear(3, 3)))
    module.net[0].requires_grad_(False)
    return module


def rejected() -> None:
    probs = mc_predict(mlp(), of(mlp()), X, samples=2, link="classification").probs
    threshold = predictive.Rejector.fit(probs, Y, risk=0.9).threshold
    zoo.save_posterior("net.safetensors", mlp(), of(mlp()), link="classification")
    assert Predictor.load("net.safetensors", model=mlp(), reject_below=threshold)(X).reject.shape == (EXAMPLES,)


BANDS = trains(regression, partial(LaplaceCallback, "full", "all", prior_precision=1), data=REGRESSION)
FOLLOWED = {
    'Use LaplaceCallback("full", "all", prior_precision=1)': (BANDS,),
    "For error bars away from the data, use Laplace": (BANDS,),
    'pass loss_reduction="mean", or return per-example losses': CASES["so it may be a mean or a sum over them"].taken,
    "choose other parameters with subset=, or pass a number": (
        fitted_laplace(subset="all"),
        fitted_laplace(prior_precision=1.0),
    ),
    'use linearized=True or "closed_form"': tuple(
        partial(mc_predict, mlp(), of(mlp()), X, link="classification", linearized=kind)
        for kind in (True, "closed_form")
    ),
    "use the optimizer VOGN directly": (updates(partial(VOGN, lr=0.1, num_data=EXAMPLES)),),
    "pass the probabilities of held-out rows to predictive.Rejector.fit": (rejected,),
    "Pass predict_once=True": CASES["Pass predict_once=True to run any step so"].taken,
    "Pass num_data= if the loader": CASES["Pass num_data=... to the callback"].taken,
    "freeze it, or choose IVONCallback()": (
        trains(frozen, VOGNCallback),
        trains(lambda: Classifier(net=Mixing()), IVONCallback),
    ),
}
DESCRIBED = (  # what the package does, and no advice
    "ends with one temperature",
    "do not read pretrained weights again",
    "read it and have no other default",
    "make demo creates",
)


def test_every_advice_of_a_page_is_followed():
    known = (*FOLLOWED, *DESCRIBED)
    found = [(page, advice) for page in PAGES for advice in advices(page)]
    missing = [pair for pair in found if not any(key in pair[1] for key in known)]
    stale = [key for key in known if not any(key in advice for _, advice in found)]
    assert not missing, missing
    assert not stale, stale


@pytest.mark.parametrize("key", FOLLOWED)
def test_an_advice_can_be_followed(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for action in FOLLOWED[key]:
        action()


@pytest.mark.parametrize("page", PAGES)
def test_every_call_in_the_text_can_be_made(page):
    spans = dict.fromkeys(span for span in _SPAN.findall(prose(page)) if _CALL.fullmatch(span))
    for span in spans:
        if span.partition("(")[0] in PUBLIC:  # with the names that the pages use
            eval(span, {**PUBLIC, "torch": torch, "model": mlp(), "params": mlp().parameters()})


def test_every_argument_in_the_text_belongs_to_something():
    known = {*OF_OTHERS}
    for value in PUBLIC.values():
        for each in (value, *(member for _, member in inspect.getmembers(value, callable) if inspect.isclass(value))):
            known |= arguments(each)
    strange = {
        (page, word)
        for page in PAGES
        for span in _SPAN.findall(prose(page))
        if (match := _WORD.fullmatch(span)) and (word := match[1]) not in known
    }
    assert not strange


def arguments(value: object) -> set[str]:
    try:
        return {*inspect.signature(value).parameters}
    except (TypeError, ValueError):
        return set()
