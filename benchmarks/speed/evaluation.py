"""What an evaluation under S posterior samples costs in units of S forwards of the bare model.

    python -m benchmarks.speed.evaluation [--models lenet resnet18] [--batch 128] [--samples 10] [--rounds 5] [--json FILE]

Evaluations and forwards take turns; a ratio is the median over rounds. The first batch draws the samples. Later ones find
them kept where S samples of the model fit into the memory for them (`predictive.samples.CACHED_ELEMENTS`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import provenance
from benchmarks.speed.methods import silence_known_warnings
from benchmarks.speed.models import MODELS, make_task
from benchmarks.speed.rounds import interleave, stopwatch
from benchmarks.speed.setting import Setting, add_arguments, read_setting
from benchmarks.speed.update import NUM_DATA
from lightning_bayes import VOGN
from lightning_bayes.predictive.samples import PosteriorSamples

Row = dict[str, Any]


@torch.no_grad()
def measure(model: str, batch: int, samples: int, rounds: int, setting: Setting) -> Row:
    """Measure one model.

    Args:
        model: Key of `MODELS`.
        batch: Examples in a batch.
        samples: S.
        rounds: Interleaved rounds.
        setting: Where to run.

    Returns:
        Seconds of S forwards, the ratio of the evaluation to them, and that of the first batch.
    """
    task = make_task(MODELS[model], batch, setting)
    network = task.model.eval()
    optimizer = VOGN(network, lr=0.0, num_data=NUM_DATA, init_precision=1e4)
    drawn = PosteriorSamples(optimizer.posterior(), samples)

    def forward() -> torch.Tensor:
        with task.autocast():
            found: torch.Tensor = network(task.images)
        return found

    def forwards() -> None:
        for _ in range(samples):
            forward()

    timed = stopwatch(setting.synchronise)
    forwards()
    first = timed(lambda: drawn.outputs(network, forward))
    steps = {"forwards": forwards, "evaluation": lambda: (drawn.outputs(network, forward), None)[1]}
    times = interleave(steps, rounds, "forwards", timed)
    seconds = times.median_seconds("forwards")
    ratio = times.median_ratio("evaluation", "forwards")
    return {
        "model": model,
        "batch": batch,
        "samples": samples,
        "seconds": seconds,
        "ratio": ratio,
        "first": first / seconds,
    }


def in_words(row: Row) -> str:
    """One printed line for a row."""
    head = f"{MODELS[row['model']].title:12} batch {row['batch']:4}  S = {row['samples']}"
    ratios = f"evaluation {row['ratio']:.2f}, first batch {row['first']:.2f}"
    return f"{head}  S forwards {row['seconds'] * 1e3:8.1f} ms  {ratios}"


def main(arguments: list[str] | None = None) -> None:
    """Print one line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["lenet", "resnet18"], choices=MODELS)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    setting = read_setting(parser, options)
    silence_known_warnings()
    rows = []
    for model in options.models:
        rows.append(measure(model, options.batch, options.samples, options.rounds, setting))
        print(in_words(rows[-1]), flush=True)
        if options.json:
            options.json.write_text(
                json.dumps({**provenance(), **setting.describe(), "results": rows}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
