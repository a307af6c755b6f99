"""Measure one batch in training mode with the smallest model of each file of timm.

python -m benchmarks.timm_sweep [--only resnet efficientnet] [--size 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models import list_models, list_modules

from benchmarks.provenance import save_json
from benchmarks.speed.rounds import words
from lightning_bayes.curvature import measure

CANDIDATES = 6  # number of names per file, the shortest
MAX_PARAMETERS = 30_000_000
SIZES = (64, 128, 224)  # some networks have a fixed or a minimum size
BATCH, CLASSES = 4, 10


def smallest(module: str, most: int = MAX_PARAMETERS) -> str | None:
    """The smallest of the `CANDIDATES` of a file of timm; None if all have more than `most` parameters."""
    names = sorted(list_models(module=module), key=lambda name: (not name.startswith("test_"), len(name), name))
    sizes: dict[str, int] = {}
    for name in names[:CANDIDATES]:
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in timm.create_model(name, num_classes=CLASSES).parameters())
    name = min(sizes, key=lambda candidate: sizes[candidate])
    return name if sizes[name] <= most else None


def build(name: str) -> tuple[torch.nn.Module, int]:
    """The model in training mode, and the smallest image size that it accepts."""
    error: Exception | None = None
    for size in SIZES:
        try:
            model = timm.create_model(name, num_classes=CLASSES).train()
            model(torch.randn(2, 3, size, size))
            return model, size
        except Exception as problem:  # models raise different errors for a wrong size
            error = problem
    raise RuntimeError(f"no size of {SIZES} fits: {error}")


def try_model(name: str) -> dict[str, Any]:
    """Measure one batch; the row has the seconds, or the reason of a refusal."""
    row: dict[str, Any] = {"model": name}
    try:
        model, row["size"] = build(name)
        x, y = torch.randn(BATCH, 3, row["size"], row["size"]), torch.arange(BATCH) % CLASSES
        row["parameters"] = sum(p.numel() for p in model.parameters())
        start = time.perf_counter()
        measured = measure(model, lambda: F.cross_entropy(model(x), y))
        row["seconds"] = time.perf_counter() - start
        row["reached"] = len(measured.curvature)
    except Exception as error:  # refusals are counted
        row["reason"] = words(error)
    return row


def run_all(modules: list[str], limit: int) -> list[dict[str, Any]]:
    """Try each file of timm; prints and returns one row per file."""
    rows: list[dict[str, Any]] = []
    for module in modules:
        signal.alarm(limit)
        try:
            name = smallest(module)
            rows.append({"file": module, **(try_model(name) if name else {"skipped": "too large"})})
        except TimeoutError:
            rows.append({"file": module, "skipped": f"more than {limit} s"})
        except Exception as error:  # a file that timm itself cannot build
            rows.append({"file": module, "skipped": words(error)})
        finally:
            signal.alarm(0)
        print(in_words(rows[-1]), flush=True)
    return rows


def in_words(row: dict[str, Any]) -> str:
    """Format a row as one printed line."""
    if "skipped" in row:
        return f"{row['file']:22s} skipped: {row['skipped']}"
    outcome = f"refused: {row['reason']}" if "reason" in row else f"measured in {row['seconds']:.1f} s"
    return f"{row['file']:22s} {row['model']:32s} {outcome}"


def _stop(*_: Any) -> None:
    raise TimeoutError


def main(arguments: list[str] | None = None) -> None:
    """Print the rows and the counts; write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="files of timm (default: all)")
    parser.add_argument("--limit", type=int, default=60, help="seconds per model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGALRM, _stop)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    rows = run_all(options.only or sorted(list_modules()), options.limit)
    attempted = [row for row in rows if "skipped" not in row]
    done = [row for row in attempted if "reason" not in row]
    print(f"{len(done)} of {len(attempted)} measured in training mode; {len(rows) - len(attempted)} skipped")
    save_json(options.json, {"timm": timm.__version__, "results": rows})


if __name__ == "__main__":
    main()
