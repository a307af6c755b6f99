"""Generates the pages of the API reference from every ``__all__`` of the package, without importing it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lightning_bayes"
MAPPED = ("callbacks", "zoo")  # directories at the repository root, symlinked into the package
TITLES = {  # package: title and summary, in the order of the navigation
    "callbacks": ("Callbacks", "Callbacks for the Lightning `Trainer`. They work on unmodified LightningModules."),
    "optim": ("Optimizers", "The same methods as `torch.optim` optimizers, for plain PyTorch."),
    "posteriors": ("Posteriors", "Distributions over weights."),
    "posthoc": ("Laplace and SWAG", "Posteriors for trained networks."),
    "predictive": ("Predictions", "From a posterior to probabilities, entropies and scores."),
    "metrics": ("Metrics and figures", "Calibration, scoring rules, selective prediction, OOD detection."),
    "zoo": ("Zoo", "Models, data modules, tasks and posterior files."),
    "curvature": ("Curvature", "Curvature measurements of a backward pass."),
    "strategies": ("Strategies", "Distributed training."),
    "report": ("Report", "A single HTML page that compares runs."),
    "linalg": ("Linear algebra", "Kronecker products, damping and Cholesky factors."),
}


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


def package_page(name: str) -> str:
    """Markdown page of one top-level subpackage, with a mkdocstrings block for each name."""
    title, summary = TITLES[name]
    homes_of = homes()
    parts = [f"# {title}\n\n{summary}"]
    for package in packages():
        if package != f"{PACKAGE}.{name}" and not package.startswith(f"{PACKAGE}.{name}."):
            continue
        items = exported(package)
        parts.append(f"## `{package}`")
        parts += [f"::: {item.path}" for item in items if homes_of[origin(item)] == item]
        elsewhere = [item for item in items if homes_of[origin(item)] != item]
        if elsewhere:
            parts.append(f"Documented above or on another page:\n\n{listing(elsewhere, homes_of)}")
    return "\n\n".join(parts) + "\n"


def top_page() -> str:
    """Markdown page of the names exported by `lightning_bayes` itself: links by page, and entries of the other names."""
    homes_of = homes()
    items = [homes_of[origin(item)] for item in exported(f"{PACKAGE}.public")]
    titles = {name: title for name, (title, _) in TITLES.items()} | {"errors": "Errors"}
    parts = [
        "# API reference",
        "Import these names with `from lightning_bayes import ...`. The other pages list all public names.",
    ]
    for name, title in titles.items():
        links = ", ".join(f"[`{item.name}`][{item.path}]" for item in items if subpackage_of(item) == name)
        parts += [f"**[{title}]({name}.md)**: {links}"] if links else []
    parts += [f"::: {item.path}" for item in items if subpackage_of(item) not in titles]
    return "\n\n".join(parts) + "\n"


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
    package_pages = {f"api/{package}.md": package_page(package) for package in TITLES}
    return {"api/index.md": top_page(), **package_pages, "api/errors.md": errors_page()}
