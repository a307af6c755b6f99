"""Cost of an evaluation under S posterior samples, in units of S forward passes of the bare model.

    python -m benchmarks.speed.evaluation [--models lenet resnet18] [--batch 128] [--samples 10] [--rounds 5] [--json FILE]

Evaluations and forward passes alternate; a ratio is the median over rounds. The first batch draws the samples. Later batches
reuse them if S samples of the model fit into the cache (`predictive.samples.CACHED_ELEMENTS`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import save_json
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
        batch: Examples per batch.
        samples: S.
        rounds: Interleaved rounds.
        setting: Device, precision and threads.

    Returns:
        Seconds of S forward passes, and the ratios of an evaluation and of the first batch to them.
    """
    task = make_task(MODELS[model], batch, setting)
    network = task.model.eval()
    optimizer = VOGN(network, lr=0.0, num_data=NUM_DATA, init_precision=1e4)
    weight_samples = PosteriorSamples(optimizer.posterior(), samples)

    def forward() -> torch.Tensor:
        with task.autocast():
            outputs: torch.Tensor = network(task.images)
        return outputs

    def forwards() -> None:
        for _ in range(samples):
            forward()

    timed = stopwatch(setting.synchronise)
    forwards()
    first = timed(lambda: weight_samples.outputs(network, forward))
    steps = {"forwards": forwards, "evaluation": lambda: (weight_samples.outputs(network, forward), None)[1]}
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
    """Format a row as one printed line."""
    head = f"{MODELS[row['model']].title:12} batch {row['batch']:4}  S = {row['samples']}"
    ratios = f"evaluation {row['ratio']:.2f}, first batch {row['first']:.2f}"
    return f"{head}  S forwards {row['seconds'] * 1e3:8.1f} ms  {ratios}"


def main(arguments: list[str] | None = None) -> None:
    """Print one line per model."""
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
        save_json(options.json, {**setting.describe(), "results": rows})


if __name__ == "__main__":
    main()
