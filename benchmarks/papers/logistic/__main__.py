"""Run the logistic regressions of both papers; the docstring of the package has the command line.

Fig. 2 of Khan et al. 2018: toy (Vadam with M = 10), usps (M = 64) and breast-cancer (M = 1 to 128), each compared with
VOGN-1, which is VOGN with batches of one example, and MF-exact. All methods get as many updates as VOGN-1 takes in
``--epochs`` passes, with learning rates that fall geometrically (`RATES`); Appendix I of the paper has its own rates for
10 000 epochs. Figs. 2-3 of Khan et al. 2017: australian and a1a, logistic regression and a small network, full batches, one
fixed rate per method.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.over_seeds import mean_and_error
from benchmarks.papers.logistic.methods import METHODS, Rates, checkpoints, last, train
from benchmarks.papers.logistic.mlp import LEARNERS, curve, tuned
from benchmarks.papers.logistic.model import Runs, load, log_loss, mean_field_optimum, negative_elbo, symmetric_kl
from benchmarks.provenance import save_json
from lightning_bayes.metrics.figure_style import BLUE, DPI, GREY, ORANGE, PANEL_WIDTH, SERIES, quiet_frame

Row = dict[str, Any]

COLUMNS = {
    "negative_elbo": "negative ELBO",
    "log_loss": "test log-loss, bits",
    "symmetric_kl": "symmetric KL to MF-exact",
}
EPOCHS = {"toy": 8000, "usps": 60, "breast-cancer": 60}  # passes of VOGN-1; the other methods get as many updates
BATCHES = {"toy": (10,), "usps": (64,), "breast-cancer": (1, 8, 16, 32, 64, 128)}
SETS = (*BATCHES, "australian", "a1a", "mlp")
RATES = {
    "vogn-1": Rates(lr=(5e-3, 5e-4), beta=(5e-3, 5e-4), momentum=0.9),
    "vadam": Rates(lr=(1e-2, 1e-4), beta=(5e-3, 5e-4), momentum=0.9),
    "cvi": Rates(lr=(0.1, 0.1), beta=(0.1, 0.1)),
    "vprop-2": Rates(lr=(0.3, 0.3), beta=(0.3, 0.3)),
    "vprop-0": Rates(lr=(0.3, 0.3), beta=(0.3, 0.3)),
    "bbb": Rates(lr=(0.03, 0.03), beta=(0.01, 0.01), momentum=0.9),
    "rmsprop": Rates(lr=(0.03, 0.03), beta=(0.01, 0.01)),
}
CURVES = {"negative_elbo": "negative ELBO per example, nats", "log_loss": "test log-loss, bits"}
EXACT = "MF-exact"
PASSES = 400  # for the figures of the Vprop paper


def metrics(data: Runs, posterior: tuple[Any, Any], exact: tuple[Any, Any] | None) -> Row:
    """The columns of the table, each with one value per run."""
    values = {
        "negative_elbo": negative_elbo(data, *posterior).tolist(),
        "log_loss": log_loss(data, *posterior).tolist(),
    }
    return values if exact is None else {**values, "symmetric_kl": symmetric_kl(*posterior, *exact).tolist()}


def posteriors(name: str, options: argparse.Namespace) -> list[Row]:
    """Khan et al. 2018, Fig. 2: final posteriors of one data set."""
    data = load(name, options.root, options.runs, same_split=name == "breast-cancer")
    exact = mean_field_optimum(data)
    rows: list[Row] = [{"set": name, "method": EXACT, **metrics(data, exact, exact)}]
    updates = (options.epochs or EPOCHS[name]) * data.num_data
    for key, batch in [("vogn-1", 1), *(("vadam", batch) for batch in BATCHES[name])]:
        title = METHODS[key].title + (f", M = {batch}" if key == "vadam" else "")
        q = last(train(METHODS[key], data, updates=updates, batch=batch, rates=RATES[key]))
        rows.append({"set": name, "method": title, "updates": updates, **metrics(data, q, exact)})
    return rows


def logistic_curves(name: str, options: argparse.Namespace) -> list[Row]:
    """Khan et al. 2017, Fig. 2: a row for the optimum, then ELBO and log-loss per method and checkpoint."""
    data = load(name, options.root, options.runs)
    rows: list[Row] = [{"set": name, "method": EXACT, **metrics(data, mean_field_optimum(data), None)}]
    shown = checkpoints(options.passes)
    for key in ("cvi", "vprop-2", "vprop-0", "bbb", "rmsprop"):
        states = train(METHODS[key], data, updates=options.passes, batch=None, rates=RATES[key])
        for t, (mean, precision) in enumerate(states, start=1):
            if t in shown:
                is_point = not METHODS[key].has_prior
                test_precision = torch.full_like(precision, torch.inf) if is_point else precision
                values: Row = {} if is_point else {"negative_elbo": negative_elbo(data, mean, precision).tolist()}
                values["log_loss"] = log_loss(data, mean, test_precision).tolist()
                rows.append({"set": name, "method": METHODS[key].title, "updates": t, **values})
    return rows


def mlp_curves(name: str, options: argparse.Namespace) -> list[Row]:
    """Khan et al. 2017, Fig. 3: the same for a small network, with tuned rates, one row per method and checkpoint."""
    data = load(name, options.root, options.runs + 1)
    updates = max(2, options.passes // 2)
    shown, rows = checkpoints(updates, 12), []
    for learner in LEARNERS:
        rates = tuned(learner, data, run=options.runs, updates=updates)
        runs = range(options.runs)
        curves = [list(curve(learner, rates, data, run=run, updates=updates, shown=shown)) for run in runs]
        for points in zip(*curves, strict=True):
            values: Row = {"log_loss": [point.log_loss for point in points]}
            if points[0].negative_elbo is not None:
                values["negative_elbo"] = [point.negative_elbo for point in points]
            rows.append(
                {"set": f"{name}, MLP", "method": learner.title, "updates": points[0].update, "rates": rates, **values}
            )
    return rows


def table(rows: Iterable[Row]) -> str:
    """Format the final values: mean ± standard error over runs; a single run has no standard error."""
    final = {(row["set"], row["method"]): row for row in rows}
    lines = [f"{'':38}" + "".join(f"{column:>28}" for column in COLUMNS.values())]
    for (name, method), row in final.items():
        cells = (mean_and_error(row[metric]) if metric in row else "–" for metric in COLUMNS)
        lines.append(f"{name + ': ' + method:38}" + "".join(f"{cell:>28}" for cell in cells))
    return "\n".join(lines)


def shortened(row: Row) -> Row:
    """A row with numbers rounded to five digits, more than runs have in common."""
    return {key: [float(f"{v:.5g}") for v in value] if isinstance(value, list) else value for key, value in row.items()}


def run(options: argparse.Namespace) -> tuple[list[Row], dict[str, Figure]]:
    """Run the requested experiments; returns rows, and figures by file name."""
    rows: list[Row] = []
    drawn: dict[str, Figure] = {}
    for name in (name for name in BATCHES if name in options.sets):
        new_rows = posteriors(name, options)
        rows += new_rows
        if name == "breast-cancer":
            distances = {row["method"]: row["symmetric_kl"] for row in new_rows if row["method"] != EXACT}
            drawn["breast-cancer.png"] = draw_batches(distances, "Vadam's posterior depends on the minibatch size")
    with_curves = [name for name in ("australian", "a1a") if name in options.sets]
    for name in with_curves:
        rows += logistic_curves(name, options) + (mlp_curves(name, options) if "mlp" in options.sets else [])
    if with_curves:
        drawn["vprop.png"] = draw_curves(rows, with_curves, "Logistic regression")
    if with_curves and "mlp" in options.sets:
        drawn["vprop_mlp.png"] = draw_curves(
            rows, [f"{name}, MLP" for name in with_curves], "Two hidden layers of ten units"
        )
    return rows, drawn


def draw_batches(values: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Fig. 2(c): symmetric KL over the minibatch size, by method; the first method is the baseline."""
    figure = Figure(figsize=(2 * PANEL_WIDTH, PANEL_WIDTH), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    drawn = axes.boxplot(list(values.values()), widths=0.5, patch_artist=True, medianprops={"color": GREY})
    for index, box in enumerate(drawn["boxes"]):
        box.set(facecolor=ORANGE if index else BLUE, alpha=0.5)
    axes.set_xticks(range(1, len(values) + 1), list(values), rotation=20)
    axes.set(yscale="log", ylabel="symmetric KL to MF-exact, nats", title=title)
    quiet_frame(axes)
    return figure


def draw_curves(rows: Iterable[Row], names: Sequence[str], title: str) -> Figure:
    """Figs. 2-3 of the Vprop paper: negative ELBO and test log-loss over passes, one column per data set."""
    figure = Figure(figsize=(1.5 * PANEL_WIDTH * len(names), 2 * PANEL_WIDTH), dpi=DPI, layout="constrained")
    grid = figure.subplots(2, len(names), squeeze=False)
    shown = [row for row in rows if row["set"] in names]
    methods = dict.fromkeys(row["method"] for row in shown if row["method"] != EXACT)
    colours = dict(zip(methods, SERIES, strict=False))
    for row, (metric, label) in enumerate(CURVES.items()):
        for axes, name in zip(grid[row], names, strict=True):
            of_set = [each for each in shown if each["set"] == name and metric in each]
            _lines(axes, [each for each in of_set if each["method"] != EXACT], metric, colours)
            for optimum in (each for each in of_set if each["method"] == EXACT):
                axes.axhline(statistics.median(optimum[metric]), color=GREY, linestyle="--", label="VI exact")
            axes.set(title=name, xlabel="updates on all data", ylabel=label, xscale="log")
    grid[1][0].legend(frameon=False)  # this row has all methods: those without a posterior have no ELBO
    figure.suptitle(title)
    return figure


def _lines(axes: Axes, rows: Sequence[Row], metric: str, colours: Mapping[str, str]) -> None:
    """Median and quartiles over runs, one line per method."""
    for method in dict.fromkeys(row["method"] for row in rows):
        points = [row for row in rows if row["method"] == method]
        updates = [row["updates"] for row in points]
        low, middle, high = np.quantile([row[metric] for row in points], (0.25, 0.5, 0.75), axis=1)
        axes.plot(updates, middle, color=colours[method], label=method)
        axes.fill_between(updates, low, high, color=colours[method], alpha=0.15, linewidth=0)
    finite = [value for row in rows for value in row[metric] if np.isfinite(value)]
    if finite:  # diverging curves leave the panel
        axes.set_ylim(0.98 * min(finite), 1.05 * float(np.quantile(finite, 0.85)))
    quiet_frame(axes)


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write figures and JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of the data files")
    parser.add_argument(
        "--sets", nargs="+", default=SETS, choices=SETS, help="mlp: also a network on australian and a1a"
    )
    parser.add_argument(
        "--epochs", type=int, help=f"passes of VOGN-1; the other methods get as many updates (default: {EPOCHS})"
    )
    parser.add_argument("--passes", type=int, default=PASSES, help="passes for Vprop's Fig. 2; Fig. 3 has half as many")
    parser.add_argument("--runs", type=int, default=10, help="random splits and seeds")
    parser.add_argument("--out", type=Path, help="folder for the figures")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows, drawn = run(options)
    print(table(rows))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        for name, figure in drawn.items():
            figure.savefig(options.out / name)
    header = {"epochs": options.epochs or EPOCHS, "passes": options.passes, "runs": options.runs}
    save_json(options.json, {**header, "results": [shortened(row) for row in rows]})


if __name__ == "__main__":
    main()
