"""Generates the pages of the API reference from every ``__all__`` of the package, without importing it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lightning_bayes"
MAPPED = ("callbacks", "zoo")  # directories at the repository root, symlinked into the package
TASKS = {  # page: title, summary and subpackages, in the order of the navigation
    "train": ("Train", "Callbacks, optimizers, schedules and strategies.", ("callbacks", "optim", "strategies")),
    "evaluate": ("Evaluate", "Metrics, figures and reports.", ("metrics", "report")),
    "predict": (
        "After training",
        "Posteriors of trained networks, predictions and decisions.",
        ("posthoc", "predictive", "posteriors"),
    ),
    "serve": ("Models, data and files", "The zoo: networks, data modules, tasks and posterior files.", ("zoo",)),
    "extend": (
        "Extend",
        "Likelihoods, curvature measurements, layer rules and linear algebra.",
        ("likelihood", "curvature", "linalg"),
    ),
}
MOVED = {  # top-level names that serve another task than the rest of their subpackage
    "evaluate": (
        "BatchNormRecalibration",
        "Calibration",
        "EvaluationFigures",
    ),
    "predict": ("DeepEnsembleCallback", "LaplaceCallback", "MCDropoutCallback", "MultiModeCallback", "SWAGCallback"),
    "serve": ("Predictor", "export", "load_posterior"),
}


FIRST = (  # names that most people take, before the others of their table
    *("VOGNCallback", "IVONCallback", "NoisyKFACCallback", "Calibration", "DeepEnsembleCallback", "LaplaceCallback"),
    *(
        "MultiModeCallback",
        "VOGN",
        "IVON",
        "NoisyKFAC",
        "load_posterior",
        "mc_predict",
        "Predictor",
        "laplace",
        "calibrate",
    ),
    *("measure", "BayesClassifier", "BayesRegressor", "create_model", "save_posterior"),
)


class Exported(NamedTuple):
    """A name listed in the ``__all__`` of a package."""

    package: str  # the exporting package, such as "lightning_bayes.optim"
    name: str

    @property
    def path(self) -> str:
        """Dotted import path."""
        return f"{self.package}.{self.name}"


def source_of(module: str) -> Path | None:
    """Source file of a module of this package; None for other packages."""
    top, *parts = module.split(".")
    if top != PACKAGE:
        return None
    folder = ROOT.joinpath(*parts) if parts[:1] and parts[0] in MAPPED else ROOT.joinpath(PACKAGE, *parts)
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    """Syntax tree of a file, cached."""
    return ast.parse(path.read_text("utf-8"))


def exports_of(path: Path) -> list[str]:
    """Names in a file's ``__all__``, in order; empty without an ``__all__``."""
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


@cache
def packages() -> list[str]:
    """Dotted names of all subpackages with an ``__all__``, parents first."""
    direct = {
        path
        for path in (ROOT / PACKAGE).rglob("__init__.py")
        if path.relative_to(ROOT / PACKAGE).parts[0] not in MAPPED
    }
    mapped = {path for name in MAPPED for path in (ROOT / name).rglob("__init__.py")}
    names = [path.parent.relative_to(ROOT).parts for path in direct | mapped if exports_of(path)]
    dotted = [".".join(parts if parts[0] == PACKAGE else (PACKAGE, *parts)) for parts in names]
    return sorted((name for name in dotted if name != PACKAGE), key=lambda name: (name.count("."), name))


def exported(module: str) -> list[Exported]:
    """Exports of a module, one entry per name in its ``__all__``."""
    path = source_of(module)
    return [Exported(module, name) for name in exports_of(path)] if path else []


@cache
def origin(item: Exported) -> tuple[str, str]:
    """Module and name of a definition, resolved through ``from module import name``."""
    path = source_of(item.package)
    for node in tree_of(path).body if path and path.exists() else []:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == item.name:
                    return origin(Exported(node.module, alias.name))
    return item.package, item.name


@cache
def homes() -> dict[tuple[str, str], Exported]:
    """Where each object is documented, by origin: at the export of its outermost package."""
    by_origin: dict[tuple[str, str], Exported] = {}
    for package in packages():
        for item in exported(package):
            by_origin.setdefault(origin(item), item)
    for item in [*errors(), *exported(f"{PACKAGE}.public")]:  # names that no subpackage exports
        by_origin.setdefault(origin(item), Exported(*origin(item)))
    return by_origin


def listing(items: list[Exported], homes_of: dict[tuple[str, str], Exported]) -> str:
    """Markdown list of links to names that are documented elsewhere."""
    return "\n".join(f"- [`{item.path}`][{homes_of[origin(item)].path}]" for item in items)


def task_page(task: str) -> str:
    """Markdown page of one task, with a mkdocstrings block for each name of its subpackages."""
    title, summary, subpackages = TASKS[task]
    homes_of = homes()
    parts = [f"# {title}\n\n{summary}"]
    top = [homes_of[origin(item)] for item in exported(f"{PACKAGE}.public")]
    alone = [item for item in top if item.package not in packages() and subpackage_of(item) != "errors"]
    parts += [f"::: {item.path}" for item in sorted(alone, key=rank) if task_of(item) == task]
    for package in packages():
        if package.split(".")[1] not in subpackages:
            continue
        items = sorted(exported(package), key=rank)
        parts.append(f"## `{package}`")
        parts += [f"::: {item.path}" for item in items if homes_of[origin(item)] == item]
        elsewhere = [item for item in items if homes_of[origin(item)] != item]
        if elsewhere:
            parts.append(f"Documented above or on another page:\n\n{listing(elsewhere, homes_of)}")
    return "\n\n".join(parts) + "\n"


def top_page() -> str:
    """Markdown page of the names exported by `lightning_bayes` itself, by task, with one line each."""
    homes_of = homes()
    items = [homes_of[origin(item)] for item in exported(f"{PACKAGE}.public")]
    order = [name for _, _, names in TASKS.values() for name in names]
    items.sort(
        key=lambda item: (rank(item), order.index(subpackage_of(item)) if subpackage_of(item) in order else len(order))
    )
    parts = [
        "# API reference",
        "Import these names with `from lightning_bayes import ...`. [Arguments of the callbacks](arguments.md) lists all "
        "arguments with their ranges and defaults.",
    ]
    for task, (title, _, _) in TASKS.items():
        rows = [f"| [`{item.name}`][{item.path}] | {summary_of(item)} |" for item in items if task_of(item) == task]
        parts.append("\n".join([f"## [{title}]({task}.md)\n", "| name | purpose |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def rank(item: Exported) -> int:
    """The place of a name among those that most people take; the others follow."""
    return FIRST.index(item.name) if item.name in FIRST else len(FIRST)


def task_of(item: Exported) -> str:
    """The task that a top-level name serves."""
    for task, names in MOVED.items():
        if item.name in names:
            return task
    return next((task for task, (_, _, names) in TASKS.items() if subpackage_of(item) in names), "extend")


def summary_of(item: Exported) -> str:
    """First sentence of a definition's docstring."""
    module, name = origin(item)
    path = source_of(module)
    nodes = tree_of(path).body if path and path.exists() else []
    docs = [ast.get_docstring(node) for node in nodes if getattr(node, "name", None) == name]  # type: ignore[arg-type]
    first = next((doc.partition("\n\n")[0].replace("\n", " ") for doc in docs if doc), "")
    return re.split(r"(?<!al\.)(?<!eqs\.)(?<=\.)\s", first)[0].replace("|", "\\|")


def subpackage_of(item: Exported) -> str:
    """Top-level subpackage of a name."""
    return item.package.split(".")[1]


def errors() -> list[Exported]:
    """Exception classes of `lightning_bayes.errors`."""
    module = f"{PACKAGE}.errors"
    path = source_of(module)
    classes = [node.name for node in tree_of(path).body if isinstance(node, ast.ClassDef)] if path else []
    return [Exported(module, name) for name in classes if not name.startswith("_")]


def errors_page() -> str:
    """Markdown page of the exceptions."""
    blocks = "\n\n".join(f"::: {item.path}" for item in errors())
    return f"# Errors\n\nAll errors of this package derive from `BayesError` and suggest the next step.\n\n{blocks}\n"


def pages() -> dict[str, str]:
    """All pages of the API reference: Markdown by path under ``docs/``."""
    task_pages = {f"api/{task}.md": task_page(task) for task in TASKS}
    return {"api/index.md": top_page(), **task_pages, "api/errors.md": errors_page()}
