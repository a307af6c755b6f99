"""Text written character by character under posterior samples, with the uncertainty of each character."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive import PosteriorSamples, Prediction, at_posterior_mean, summarise
from lightning_bayes.zoo.data.text import Alphabet


class Generated(NamedTuple):
    """A text and how sure the model was of each character.

    Attributes:
        text: The generated text, without the prompt.
        entropy: Total uncertainty of every character, in nats, ``[len(text)]``.
        mutual_information: The part that is due to the weights, in nats, ``[len(text)]``.
        prob: Probability of the character that was drawn, ``[len(text)]``.
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
    """Write on after a prompt, each character drawn from the probabilities averaged over posterior samples.

    Args:
        model: A model from characters ``[1, L]`` to logits ``[1, V, T]``; its own weights do not matter.
        posterior: The posterior of its weights.
        alphabet: The data module's.
        prompt: At least one character more than the model's ``context``.
        length: Characters to write.
        samples: S, weight samples; the same ones for all characters.
        window: Characters that the model sees at most.
        seed: The seed of weights and characters.

    Returns:
        The text. A prompt with unknown characters is a `DataError`.

    Raises:
        HyperparameterError: If a size is out of range or the prompt too short.

    Example:
        >>> from lightning_bayes.posteriors import MeanField
        >>> from lightning_bayes.zoo.models import CharRNN
        >>> model = CharRNN(vocabulary=2, embedding=2, hidden=2, layers=1)
        >>> mean = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        >>> q = MeanField(mean, {n: torch.ones_like(p) for n, p in mean.items()}, dict.fromkeys(mean, 1.0), num_data=1)
        >>> len(generate(model, q, Alphabet("ab"), "ab", length=5).text)
        5
    """
    context = getattr(model, "context", 0)
    if length < 1 or samples < 1 or window <= context or len(prompt) <= context:
        raise HyperparameterError(
            f"length={length}, samples={samples}, window={window} and a prompt of {len(prompt)} characters: the first two "
            f"must be at least 1, the others larger than the model's context of {context}."
        )
    numbers = alphabet.encode(prompt).tolist()
    device = next(model.parameters()).device
    draws = PosteriorSamples(posterior.to(device), samples, seed)
    generator = torch.Generator().manual_seed(seed)
    steps: list[tuple[int, Prediction]] = []
    with at_posterior_mean(model, posterior):
        for _ in range(length):
            seen = torch.tensor([numbers[-window:]], device=device)
            found = summarise(draws.outputs(model, lambda seen=seen: model(seen)[..., -1]).cpu(), "softmax")  # type: ignore[misc]
            assert isinstance(found, Prediction)
            numbers.append(int(torch.multinomial(found.probs[0, : len(alphabet)], 1, generator=generator)))
            steps.append((numbers[-1], found))
    return Generated(
        alphabet.decode(numbers[-length:]),
        torch.cat([found.entropy for _, found in steps]),
        torch.cat([found.mutual_information for _, found in steps]),
        torch.stack([found.probs[0, drawn] for drawn, found in steps]),
    )
