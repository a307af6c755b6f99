"""What the programs of this folder share: options, and a loop over the runs that a JSON file does not hold."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.provenance import save_json, saved_rows

Record = dict[str, Any]


def study_parser(doc: str | None, first_seed: int, seeds: int, **axes: Collection[str]) -> argparse.ArgumentParser:
    """A parser of the data's root, the seeds, the file, and the values of each axis, by default all."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"))
    for name, values in axes.items():
        parser.add_argument(f"--{name}", nargs="+", choices=values, default=list(values))
    parser.add_argument("--first-seed", type=int, default=first_seed)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--json", type=Path, help="file that keeps the runs; those that it holds are skipped")
    parser.add_argument("--table", action="store_true", help="only print the table of the file")
    return parser


def run_study(
    options: argparse.Namespace, axes: Collection[str], run: Callable[..., Iterable[Record]], key: str = "results"
) -> list[Record]:
    """Run what is missing, save the records of every run at once, and return all.

    Args:
        options: What `study_parser` parsed.
        axes: Names of options; a record holds the value of each, without the plural's s.
        run: Called with the root, a value of each axis and a seed; the records may give another method or seed.
        key: Where the file holds the records.

    Returns:
        The records, those of the file first.
    """
    records: list[Record] = saved_rows(options.json, key)
    names = [*(axis.removesuffix("s") for axis in axes), "seed"]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for seed, *values in [] if options.table else product(seeds, *(getattr(options, axis) for axis in axes)):
        of_run = dict(zip(names, [*values, seed], strict=True))
        if any(record.items() >= of_run.items() for record in records):
            continue
        for found in run(options.root, *values, seed):
            records.append({**of_run, **found})
            print({name: round(v, 4) if isinstance(v, float) else v for name, v in records[-1].items()}, flush=True)
        save_json(options.json, {key: records})
    return records
