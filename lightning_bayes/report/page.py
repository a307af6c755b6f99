"""The page: HTML with everything inside, and nothing to run."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from html import escape

from matplotlib.figure import Figure

from lightning_bayes.report.drawn import shift_comparison, training_curves
from lightning_bayes.report.runs import Run
from lightning_bayes.report.tables import Table, config_differences, metric_tables

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1b1b; max-width: 1500px; margin: 2em auto; padding: 0 1.5em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin-top: 2em; border-bottom: 1px solid #ccc; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25em .6em; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e4e4; }
th { font-weight: 600; vertical-align: bottom; } thead th { white-space: normal; min-width: 3.6em; }
th:first-child, td:first-child, .text td { text-align: left; position: sticky; left: 0; background: #fff; }
.text th { text-align: left; } .text td { position: static; white-space: pre-wrap; }
.best { font-weight: 700; color: #0072B2; }
.figures { display: flex; flex-wrap: wrap; gap: 1.5em; } figure { margin: 0; } figcaption { font-weight: 600; }
img { max-width: 100%; } pre { background: #f6f6f6; padding: 1em; overflow-x: auto; } summary { cursor: pointer; }
"""
# Of figures whose name alone is no good title.
_TITLES = {"ood_scores": "OOD scores", "risk_coverage": "Risk and coverage"}


def render(runs: Sequence[Run]) -> str:
    """Write the page.

    Args:
        runs: The runs to compare, at least one.

    Returns:
        A whole HTML document.
    """
    parts = [
        f"<h1>Comparison of {len(runs)} run{'s' if len(runs) > 1 else ''}</h1>",
        _overview(runs),
        "<p>The best value of a column is bold. All values are what the runs have logged; nothing is computed anew.</p>",
        _different_data(runs),
        *(f"<h2>{escape(table.title)}</h2>{_table(table)}" for table in metric_tables(runs)),
        *_drawn(runs),
        *_stored_figures(runs),
        _differences(runs),
        *_details(runs),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(', '.join(run.name for run in runs))}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _overview(runs: Sequence[Run]) -> str:
    rows = "".join(
        f"<tr><td>{escape(run.name)}</td><td>{escape(str(run.folder))}</td>"
        f"<td>{escape(', '.join(path.name for path in run.checkpoints) or '–')}</td></tr>"
        for run in runs
    )
    head = "<tr><th>run</th><th>folder</th><th>checkpoints</th></tr>"
    return f'<div class="scroll"><table class="text"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _different_data(runs: Sequence[Run]) -> str:
    data = dict.fromkeys(str(run.config["data.class_path"]) for run in runs if "data.class_path" in run.config)
    if len(data) < 2:
        return ""
    return f"<p><b>These runs are on different data</b> ({escape(', '.join(data))}); their values do not compare.</p>"


def _table(table: Table) -> str:
    best = [table.best(column) for column in range(len(table.columns))]
    # An arrow stays on the line of the last word.
    head = "".join(f"<th>{'&nbsp;'.join(escape(column).rsplit(' ', 1))}</th>" for column in table.columns)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(map(_cell, values, best))}</tr>" for name, values in table.rows
    )
    return f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(value: float | None, best: float | None) -> str:
    if value is None or math.isnan(value):
        return "<td>–</td>"
    return f'<td class="best">{value:.4f}</td>' if value == best else f"<td>{value:.4f}</td>"


def _drawn(runs: Sequence[Run]) -> list[str]:
    drawn = {"Training": training_curves(runs), "Shift": shift_comparison(runs)}
    return [f"<h2>{title}</h2>{_image(_png(figure), title)}" for title, figure in drawn.items() if figure is not None]


def _stored_figures(runs: Sequence[Run]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.figures)
    parts = []
    for name in names:
        each = "".join(
            f"<figure><figcaption>{escape(run.name)}</figcaption>"
            f"{_image(run.figures[name].read_bytes(), f'{name} of {run.name}')}</figure>"
            for run in runs
            if name in run.figures
        )
        title = escape(_TITLES.get(name, name.replace("_", " ").capitalize()))
        parts.append(f'<h2>{title}</h2><div class="figures">{each}</div>')
    return parts


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _image(png: bytes, description: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f'<img alt="{escape(description)}" src="data:image/png;base64,{data}">'


def _differences(runs: Sequence[Run]) -> str:
    rows = config_differences(runs)
    if not rows:
        return ""
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    body = "".join(
        f"<tr><td>{escape(key)}</td>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for key, values in rows
    )
    table = f'<table class="text"><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<h2>Settings that differ</h2><div class="scroll">{table}</div>'


def _details(runs: Sequence[Run]) -> list[str]:
    parts = ["<h2>Everything</h2>"]
    for run in runs:
        values = "\n".join(f"{key}: {value:.6g}" for key, value in sorted(run.last.items()))
        for what, text in (("last values", values), ("config.yaml", run.config_text)):
            if text:
                parts.append(
                    f"<details><summary>{escape(run.name)}: {what}</summary><pre>{escape(text)}</pre></details>"
                )
    return parts
