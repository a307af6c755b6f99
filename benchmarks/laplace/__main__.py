"""Laplace of this package compared with laplace-torch: relative differences of precision, evidence and predictive.

    python -m benchmarks.laplace [--json benchmarks/results/laplace.json]

``pip install -e '.[bench]'`` installs laplace-torch.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.provenance import save_json
from lightning_bayes import laplace, mc_predict
from lightning_bayes.posteriors import AbstractPosterior, EigenGaussian, FullGaussian, MeanField

STRUCTURES: Final = {"diagonal": "diag", "kronecker": "kron", "full": "full"}
SUBSETS: Final = ("last_layer", "all")
NETWORKS: Final = {
    "MLP": lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)),
    "CNN": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2), nn.Tanh(), nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    ),
}
SHAPES: Final = {"MLP": (8,), "CNN": (1, 8, 8)}
PRIOR: Final = 0.7
EXAMPLES: Final = 60


def agreements(backends: list[type[Any]]) -> Iterator[dict[str, Any]]:
    """Compare every structure and subset in double precision, with the given backends of laplace-torch."""
    for name, build in NETWORKS.items():
        torch.manual_seed(0)
        net = build().double().eval()
        x = torch.randn(EXAMPLES, *SHAPES[name], dtype=torch.float64)
        y = torch.randint(3, (EXAMPLES,))
        for subset in SUBSETS:
            for structure in STRUCTURES:
                for backend in backends:
                    line = {"network": name, "subset": subset, "structure": structure, "backend": backend.__name__}
                    yield {**line, **_compared(net, x, y, subset, structure, backend)}


def _compared(net: nn.Module, x: Tensor, y: Tensor, subset: str, structure: Any, backend: type[Any]) -> dict[str, Any]:
    loader = DataLoader(TensorDataset(x, y), batch_size=25)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from laplace import Laplace

            peer = Laplace(
                copy.deepcopy(net),
                "classification",
                subset,
                STRUCTURES[structure],
                prior_precision=PRIOR,
                backend=backend,
            )
            peer.fit(loader)
            precision, evidence, probs = _dense_peer(peer), float(peer.log_marginal_likelihood()), peer(x)
        except Exception as error:  # a failure of the peer is a line of the table
            return {"peer": f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"}
    approximation = laplace(
        net, loader, structure=structure, subset=subset, prior_precision=PRIOR, require_trained=False
    )
    ours = mc_predict(net, approximation.posterior, x, linearized="closed_form").probs
    return {
        "precision": _difference(_dense(approximation.posterior), precision),
        "evidence": abs(approximation.log_marginal_likelihood / evidence - 1),
        "probit": _difference(ours, probs),
    }


def _difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def _dense_peer(peer: Any) -> Tensor:
    precision = peer.posterior_precision
    if hasattr(precision, "to_matrix"):
        precision = precision.to_matrix()
    return torch.diag(precision) if precision.dim() == 1 else precision


def _dense(posterior: AbstractPosterior) -> Tensor:
    if isinstance(posterior, FullGaussian):
        return posterior.precision
    if isinstance(posterior, MeanField):
        return torch.diag(torch.cat([value.flatten() for value in posterior.precision.values()]))
    assert isinstance(posterior, EigenGaussian)
    blocks = []
    for name, bases in posterior.bases.items():
        basis = torch.kron(bases[0], bases[1]) if len(bases) == 2 else bases[0]
        blocks.append(basis @ torch.diag(posterior.eigenvalues[name].flatten()) @ basis.mT)
    return torch.block_diag(*blocks)


Record = dict[str, Any]


def table(records: list[Record]) -> str:
    """Format a Markdown table of relative differences; a failure of laplace-torch stands in its line."""
    lines = ["| network | subset | structure | laplace-torch by | precision | evidence | probit |", "|---" * 7 + "|"]
    for line in records:
        values = [f"{line[key]:.0e}" for key in ("precision", "evidence", "probit")] if "probit" in line else None
        cells = [line[key] for key in ("network", "subset", "structure", "backend")]
        lines.append(f"| {' | '.join([*cells, *(values or [line['peer'], '', ''])])} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Compare, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if find_spec("laplace") is None:
        parser.error("laplace-torch is not installed; pip install -e '.[bench]' installs it")
    from laplace.curvature import BackPackGGN, CurvlinopsGGN

    records = list(agreements([CurvlinopsGGN, BackPackGGN]))
    save_json(options.json, {"agreement": records})
    print(table(records))


if __name__ == "__main__":
    main()
