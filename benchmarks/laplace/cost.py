"""Time and peak memory of one approximation; runs as a separate process.

    python -m benchmarks.laplace.cost NETWORK PACKAGE SUBSET STRUCTURE BATCH EXAMPLES

Prints one line of JSON. Memory is the high-water mark of the resident set, relative to the process with the network and its
data (Linux).
"""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.laplace.agreement import STRUCTURES
from benchmarks.speed.memory import PeakMemory
from lightning_bayes import laplace as approximated
from lightning_bayes.zoo import create_model

OURS: Final = "lightning-bayes"
LIMIT_GIB: Final = 10.0  # limit of the address space; a method that needs more fails


def network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A network in evaluation mode and the shape of its input: torchvision's ResNet-18 or LeNet-5."""
    if name == "resnet18":
        from torchvision.models import resnet18

        return resnet18(num_classes=10).eval(), (3, 32, 32)
    return create_model("lenet5", 10, in_channels=1, image_size=28).eval(), (1, 28, 28)


def approximate(package: str, model: nn.Module, loader: DataLoader[Any], subset: str, structure: Any) -> float:
    """Run one package at a given prior precision; returns its log marginal likelihood."""
    if package == OURS:
        approximation = approximated(
            model, loader, structure=structure, subset=subset, prior_precision=1.0, require_trained=False
        )
        return approximation.log_marginal_likelihood
    import laplace as peer
    from laplace import curvature

    backend = getattr(curvature, package)
    fitted = peer.Laplace(model, "classification", subset, STRUCTURES[structure], backend=backend)
    fitted.fit(loader)
    return float(fitted.log_marginal_likelihood())


def main(arguments: list[str]) -> None:
    """Measure and print one line of JSON."""
    name, package, subset, structure, batch, examples = arguments
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    limit = int(LIMIT_GIB * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    model, shape = network(name)
    x, y = torch.randn(int(examples), *shape), torch.randint(10, (int(examples),))
    with torch.no_grad():
        model(x[:1])
    if package != OURS:
        import laplace  # noqa: F401  (its imports are not part of the cost)
    memory, start = PeakMemory("cpu"), (time.perf_counter(), time.process_time())
    try:
        evidence = approximate(
            package, model, DataLoader(TensorDataset(x, y), batch_size=int(batch)), subset, structure
        )
        outcome: dict[str, Any] = {"evidence": evidence}
    except Exception as error:  # the failure is the result
        outcome = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"}
    seconds = {"seconds": time.perf_counter() - start[0], "cpu_seconds": time.process_time() - start[1]}
    print(json.dumps({**outcome, **seconds, "peak_mib": memory.added_mib()}))


if __name__ == "__main__":
    main(sys.argv[1:])
