"""Character-level text generation under posterior samples, with the uncertainty of each character."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive import PosteriorSamples, Prediction, at_posterior_mean, summarise
from lightning_bayes.zoo.data.text import Alphabet


class Generated(NamedTuple):
    """A generated text with the uncertainty of each character.

    Attributes:
        text: The generated text, without the prompt.
        entropy: Total uncertainty of each character in nats, ``[len(text)]``.
        mutual_information: Epistemic uncertainty of each character in nats, ``[len(text)]``.
        prob: Probability of each generated character, ``[len(text)]``.
    """

    text: str
    entropy: Tensor
    mutual_information: Tensor
    prob: Tensor


@torch.no_grad()
def generate(
    model: nn.Module,
    posterior: AbstractPosterior,
    alphabet: Alphabet,
    prompt: str,
    length: int = 200,
    *,
    samples: int = 8,
    window: int = 50,
    seed: int = 0,
) -> Generated:
    """Continue a prompt. Each character is drawn from the probabilities averaged over posterior samples."""
    context = getattr(model, "context", 0)
    if length < 1 or samples < 1 or window <= context or len(prompt) <= context:
        raise HyperparameterError(
            f"generate got length={length}, samples={samples}, window={window} and a prompt of {len(prompt)} characters. "
            f"length and samples must be at least 1; window and prompt must exceed the model's context of {context}."
        )
    tokens = alphabet.encode(prompt).tolist()
    device = next(model.parameters()).device
    weight_samples = PosteriorSamples(posterior.to(device), samples, seed)
    generator = torch.Generator().manual_seed(seed)
    predictions: list[Prediction] = []
    with at_posterior_mean(model, posterior):
        for _ in range(length):
            inputs = torch.tensor([tokens[-window:]], device=device)
            logits = weight_samples.outputs(model, partial(model, inputs))[..., -1]
            prediction = summarise(logits.cpu(), "softmax")
            assert isinstance(prediction, Prediction)
            tokens.append(int(torch.multinomial(prediction.probs[0, : len(alphabet)], 1, generator=generator)))
            predictions.append(prediction)
    generated = tokens[-length:]
    return Generated(
        alphabet.decode(generated),
        torch.cat([prediction.entropy for prediction in predictions]),
        torch.cat([prediction.mutual_information for prediction in predictions]),
        torch.stack([p.probs[0, token] for p, token in zip(predictions, generated, strict=True)]),
    )
