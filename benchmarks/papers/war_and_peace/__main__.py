"""The character model on War and Peace, Khan et al. 2018, App. M and Fig. 8.

    python -m benchmarks.papers.war_and_peace --path war_and_peace.txt [--methods adam vadam] [--seeds 3] [--epochs 3]
        [--limit 1000000] [--json FILE] [--figure FILE] [--text-figure FILE]

An LSTM with two layers of 128 units reads chunks of 50 characters. 80 % of the text is for training, 10 % for validation and
10 % for the test. JSON is written after each run; finished runs are skipped. SGD overtakes Adam near epoch 64 (DeepOBS), so
the order after a few epochs says nothing about the claim of the paper.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.papers.war_and_peace.figures import as_paragraph, draw_curves, draw_text
from benchmarks.papers.war_and_peace.methods import METHODS
from benchmarks.papers.war_and_peace.report import Row, promises, table
from benchmarks.papers.war_and_peace.training import PROMPT, Setting, run
from benchmarks.provenance import provenance


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="text file in UTF-8")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=Setting.epochs)
    parser.add_argument("--limit", type=int, help="number of characters to use (default: all)")
    parser.add_argument("--hidden", type=int, default=Setting.hidden)
    parser.add_argument("--written", type=int, default=Setting.written, help="characters to generate with a posterior")
    parser.add_argument("--json", type=Path, help="written after each run; finished runs are skipped")
    parser.add_argument("--figure", type=Path)
    parser.add_argument(
        "--text-figure", type=Path, help="first text generated with posterior samples, shaded by uncertainty"
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and print the table."""
    options = make_parser().parse_args(arguments)
    torch.set_num_threads(1)
    setting = Setting(options.path, options.epochs, options.limit, options.hidden, written=options.written)
    rows: list[Row] = []
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text("utf-8"))["results"]
    done = {(row["method"], row["seed"]) for row in rows}
    for seed, method in ((seed, method) for seed in range(options.seeds) for method in options.methods):
        if (method, seed) in done:
            continue
        row, written = run(method, seed, setting)
        rows.append(row)
        print(f"{method}, seed {seed}: {row['nats']:.3f} nats, {row['seconds']:.0f} s", flush=True)
        if written is not None:
            print(as_paragraph(PROMPT + written.text), flush=True)
            if options.text_figure:
                draw_text(PROMPT, written.text, written.mutual_information, options.text_figure)
                options.text_figure = None
        if options.json:
            shared = {**asdict(setting), "path": Path(setting.path).name}
            options.json.write_text(json.dumps({**provenance(), "setting": shared, "results": rows}) + "\n", "utf-8")
    if options.figure:
        draw_curves(rows, options.figure)
    print(table(rows))
    print("\n".join(f"- {line}" for line in promises(rows, setting.epochs)))


if __name__ == "__main__":
    main()
