"""Where posterior files are: by name in a folder, in this package, and on the Hugging Face Hub; and their model cards.

A repository of the Hub holds one file, with the model card as its README. The functions use the official ``huggingface_hub``
client, including its login, cache and offline mode.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood.value import stored_likelihood
from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior

VARIABLE: Final = "LIGHTNING_BAYES_HOME"  # environment variable that overrides the folder
SUFFIX: Final = ".safetensors"
PACKAGED: Final = Path(__file__).parent / "posteriors"
HUB_FILE: Final = f"posterior{SUFFIX}"
_REPLACED_SUFFIXES: Final = {SUFFIX, ".pt", ".pth"}
_METADATA: Final = """---
library_name: lightning-bayes
tags:
- bayesian
- uncertainty
---

"""
_MAX_LISTED: Final = 3  # more prior precisions than this are shown as a range


def posterior_folder() -> Path:
    """The folder of named posterior files, if any: ``$LIGHTNING_BAYES_HOME``, or else ``~/.cache/lightning_bayes``."""
    return Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "lightning_bayes")


def find_posterior(path: str | os.PathLike[str]) -> Path:
    """A file by its path or name, with or without suffix: in the working directory, `posterior_folder`, or this package."""
    for base in (Path(path), posterior_folder() / path, PACKAGED / path):
        for file in (base, base.with_name(f"{base.name}{SUFFIX}")):
            if file.is_file():
                return file
    own = ", ".join(sorted(file.stem for file in posterior_folder().glob(f"*{SUFFIX}")))
    packaged = ", ".join(packaged_posteriors())
    raise FileNotFoundError(
        f"There is no posterior file {path} in {Path.cwd()} or in {posterior_folder()}, which contains {own or 'none'}. "
        f"Save one there with zoo.save_posterior(zoo.posterior_folder() / 'NAME.safetensors', ...), set {VARIABLE} to use "
        f"another folder, or load one of this package: {packaged or 'none'}."
    )


def packaged_posteriors() -> list[str]:
    """Names of the posteriors in this package, for `load`."""
    return sorted(file.stem for file in PACKAGED.glob(f"*{SUFFIX}"))


def card_of(path: Path) -> Path:
    """The path of a posterior file's model card; raises HyperparameterError if the file itself ends in ``.md``."""
    if path.suffix == ".md":
        raise HyperparameterError(
            f"{path} would be overwritten by its own model card. Use another suffix, such as .safetensors."
        )
    return path.with_suffix(".md") if path.suffix in _REPLACED_SUFFIXES else path.with_name(f"{path.name}.md")


def model_card(file_name: str, content: dict[str, Any], posterior: AbstractPosterior) -> str:
    """The Markdown model card of a posterior file; `content` is the contents of the file without the posterior."""
    return "\n".join(_lines(file_name, content, posterior)) + "\n"


def _lines(file_name: str, content: dict[str, Any], posterior: AbstractPosterior) -> Iterator[str]:
    num_weights = sum(mean.numel() for mean in posterior.mean.values())
    yield f"# {file_name}"
    yield ""
    yield "A Gaussian posterior over the weights of a neural network, written by lightning-bayes."
    yield ""
    yield from ("| | |", "|---|---|")
    yield f"| Architecture | `{_architecture(content['architecture'])}` |"
    yield f"| Posterior | {type(posterior).__name__} over {num_weights} weights in {len(posterior.mean)} tensors |"
    if isinstance(posterior, ScaledPosterior):
        predictive = "linearised" if posterior.linearized else "sampled"
        unscaled = type(posterior.posterior).__name__
        yield f"| Width | {posterior.scale:.4g} × the {unscaled} width, for the {predictive} predictive |"
    yield f"| Training examples N | {posterior.num_data:g} |"
    yield f"| Prior precision | {_prior_precision(posterior)}, centred {_prior_mean(posterior)} |"
    yield f"| Input | {_input(content['transform'])} |"
    if content["temperature"] != 1:
        yield f"| Temperature | {content['temperature']:.4g}, divides the logits |"
    yield f"| Classes | {', '.join(content['class_names']) or 'not named'} |"
    yield from ("", "```python", *_usage(file_name, content), "```")
    if content["metrics"]:
        yield from ("", "## Metrics", "", "| metric | value |", "|---|---|")
        yield from (f"| {name} | {value:.4g} |" for name, value in sorted(content["metrics"].items()))
    if content["config"]:
        yield from ("", "## Training", "", "```json", json.dumps(content["config"], indent=2), "```")


def _architecture(origin: dict[str, Any]) -> str:
    if origin["arguments"] is None:
        return str(origin["factory"])
    arguments = [f"{name}={value!r}" for name, value in origin["arguments"].items()]
    if "name" in origin:
        return f"create_model({', '.join([repr(origin['name']), *arguments])})"
    return f"{origin['factory']}({', '.join(arguments)})"


def _prior_precision(posterior: AbstractPosterior) -> str:
    scalars = [value for value in posterior.prior_precision.values() if not isinstance(value, Tensor)]
    if len(scalars) < len(posterior.prior_precision):
        return " to ".join(f"{end:.3g}" for end in posterior.prior_range()) + ", per weight"
    values = sorted(set(scalars))
    if len(values) <= _MAX_LISTED:
        return ", ".join(f"{value:g}" for value in values)
    return f"{values[0]:.3g} to {values[-1]:.3g}"


def _prior_mean(posterior: AbstractPosterior) -> str:
    if not posterior.prior_mean:
        return "at zero"
    at_mean = [name for name, center in posterior.prior_mean.items() if center.equal(posterior.mean[name])]
    elsewhere = [name for name in posterior.prior_mean if name not in at_mean]
    parts = []
    if at_mean:
        parts.append(f"at the posterior mean for {len(at_mean)} tensors")
    if elsewhere:
        parts.append(f"at other values for {', '.join(elsewhere)}")
    return "; ".join(parts)


def _input(transform: dict[str, Any] | None) -> str:
    if transform is None:
        return "as in training; no transform is stored"
    size = transform["image_size"]
    return f"{len(transform['mean'])} × {size} × {size} pixels, mean {transform['mean']}, std {transform['std']}"


def _usage(file_name: str, content: dict[str, Any]) -> Iterator[str]:
    origin, extra = content["architecture"], ""
    if origin["arguments"] is None or origin.get("factory", "").startswith("__main__:"):
        extra = ", model=network"  # a class of a script cannot be imported elsewhere
    elif "name" not in origin:
        extra = f", allow={origin['factory'].partition(':')[0].partition('.')[0]!r}"
    yield "from lightning_bayes import Predictor"
    yield ""
    yield f'predict = Predictor.load("{file_name}"{extra})'
    if content["transform"]:
        yield "prediction = predict(image)  # a path, a PIL image, or bytes"
    else:
        yield "prediction = predict(inputs)  # floats [B, ...]"
    has_classes = any(scored.kind.has_classes for scored in stored_likelihood(content).outputs)
    fields = ("probs", "entropy", "mutual_information") if has_classes else ("mean", "std")
    yield ", ".join(f"prediction.{name}" for name in fields)


def push_to_hub(
    path: str | os.PathLike[str], repo_id: str, *, private: bool = False, revision: str | None = None
) -> str:
    """Upload a posterior file and its model card.

    Args:
        path: A file written by `save_posterior`, or its name. The model card must be next to the file.
        repo_id: ``"user/name"``; a missing repository is created.
        private: Whether a new repository is private.
        revision: The branch; None means the main branch.

    Returns:
        The URL of the repository.

    Raises:
        ConnectionError: If the Hub cannot be reached.
    """
    file = find_posterior(path)
    api = _client().HfApi()
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
    except Exception as error:  # of the client's transport, which differs between its versions
        if not any("Connect" in kind.__name__ for kind in type(error).__mro__):
            raise
        raise ConnectionError(f"The Hub cannot be reached ({error}). Push {file} again when it can.") from error
    api.upload_file(path_or_fileobj=_card(file, repo_id), path_in_repo="README.md", repo_id=repo_id, revision=revision)
    api.upload_file(path_or_fileobj=str(file), path_in_repo=HUB_FILE, repo_id=repo_id, revision=revision)
    return str(url)


def from_hub(repo_id: str, *, revision: str | None = None) -> Path:
    """Download a posterior file into the cache of the Hub client.

    Predict with ``Predictor.load(from_hub("user/name"))``.

    Args:
        repo_id: ``"user/name"``.
        revision: A branch, tag or commit; None means the main branch. Pin a commit to keep a file that you have checked.

    Returns:
        The path of the file, for `lightning_bayes.zoo.load`, which runs no code from the file.
    """
    return Path(_client().hf_hub_download(repo_id, HUB_FILE, revision=revision))


def _card(file: Path, repo_id: str) -> bytes:
    """The model card with the Hub's metadata; its example loads the file by the repository name."""
    card = card_of(file)
    text = card.read_text("utf-8") if card.is_file() else f"# {file.name}\n"
    text = text.replace(f'Predictor.load("{file.name}"', f'Predictor.load(zoo.from_hub("{repo_id}")')
    text = text.replace("from lightning_bayes import Predictor\n", "from lightning_bayes import Predictor, zoo\n")
    return (_METADATA + text.replace(file.name, HUB_FILE)).encode()


def _client() -> Any:
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'The Hub needs huggingface_hub, which is not installed. Run: pip install "lightning-bayes[hub]"'
        ) from error
    return huggingface_hub
