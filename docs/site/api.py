"""Pages of the API reference, read from every ``__all__`` of the package without importing it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lightning_bayes"
MAPPED = ("callbacks", "zoo")  # real directories at the root, links inside of the package
TITLES = {  # room: title and sentence, in the order of the navigation
    "callbacks": ("Callbacks", "What a `Trainer` takes. Every callback works on an unmodified LightningModule."),
    "optim": ("Optimizers", "The same methods as `torch.optim` optimizers, for plain PyTorch."),
    "posteriors": ("Posteriors", "Distributions over weights."),
    "posthoc": ("Laplace and SWAG", "Posteriors of finished networks."),
    "predictive": ("Predictions", "From a posterior to probabilities, entropies and scores."),
    "metrics": ("Metrics and figures", "Calibration, scoring rules, selective prediction, OOD detection."),
    "zoo": ("Zoo", "Models, data modules, tasks and files of posteriors."),
    "curvature": ("Curvature", "What a backward pass is asked to measure."),
    "strategies": ("Strategies", "Training on several devices."),
    "report": ("Report", "One HTML page about finished runs."),
    "linalg": ("Linear algebra", "Kronecker products, damping and Cholesky factors."),
}


class Exported(NamedTuple):
    """A name of some ``__all__``."""

    package: str  # that exports it, such as "lightning_bayes.optim"
    name: str

    @property
    def path(self) -> str:
        """The dotted path by which users import it."""
        return f"{self.package}.{self.name}"


def source_of(module: str) -> Path | None:
    """The file of a module.

    Args:
        module: Its dotted name.

    Returns:
        The file; None for a module of another package.
    """
    top, *parts = module.split(".")
    if top != PACKAGE:
        return None
    folder = ROOT.joinpath(*parts) if parts[:1] and parts[0] in MAPPED else ROOT.joinpath(PACKAGE, *parts)
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, read once.

    Args:
        path: The file.

    Returns:
        Its tree.
    """
    return ast.parse(path.read_text("utf-8"))


def exports_of(path: Path) -> list[str]:
    """The names in a file's ``__all__``.

    Args:
        path: The file.

    Returns:
        The names in their order; none without an ``__all__``.
    """
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


@cache
def packages() -> list[str]:
    """Every package with an ``__all__`` below the top, parents first.

    Returns:
        Dotted names.
    """
    own = {
        path
        for path in (ROOT / PACKAGE).rglob("__init__.py")
        if path.relative_to(ROOT / PACKAGE).parts[0] not in MAPPED
    }
    mapped = {path for name in MAPPED for path in (ROOT / name).rglob("__init__.py")}
    names = [path.parent.relative_to(ROOT).parts for path in own | mapped if exports_of(path)]
    dotted = [".".join(parts if parts[0] == PACKAGE else (PACKAGE, *parts)) for parts in names]
    return sorted((name for name in dotted if name != PACKAGE), key=lambda name: (name.count("."), name))


def exported(module: str) -> list[Exported]:
    """What a module exports.

    Args:
        module: Its dotted name.

    Returns:
        One entry for each name of its ``__all__``.
    """
    path = source_of(module)
    return [Exported(module, name) for name in exports_of(path)] if path else []


@cache
def origin(item: Exported) -> tuple[str, str]:
    """Where a name is defined, followed through ``from module import name``.

    Args:
        item: An exported name.

    Returns:
        The module that defines it, and its name there.
    """
    path = source_of(item.package)
    for node in tree_of(path).body if path and path.exists() else []:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == item.name:
                    return origin(Exported(node.module, alias.name))
    return item.package, item.name


@cache
def homes() -> dict[tuple[str, str], Exported]:
    """The one place at which each object is documented.

    Returns:
        By origin, the export of the outermost package, where users import it.
    """
    found: dict[tuple[str, str], Exported] = {}
    for package in packages():
        for item in exported(package):
            found.setdefault(origin(item), item)
    for item in [*errors(), *exported(f"{PACKAGE}.public")]:  # what no room has, at the place of its definition
        found.setdefault(origin(item), Exported(*origin(item)))
    return found


def listing(items: list[Exported], homes_of: dict[tuple[str, str], Exported]) -> str:
    """Links to the entries of names that are documented elsewhere.

    Args:
        items: The names.
        homes_of: From `homes`.

    Returns:
        A Markdown list.
    """
    links = [f"- [`{item.path}`][{homes_of[origin(item)].path}]" for item in items]
    return "\n".join(links)


def room_page(room: str) -> str:
    """The page of one room.

    Args:
        room: A key of `TITLES`.

    Returns:
        Markdown with one mkdocstrings block for each name.
    """
    title, sentence = TITLES[room]
    homes_of = homes()
    parts = [f"# {title}\n\n{sentence}"]
    for package in packages():
        if package != f"{PACKAGE}.{room}" and not package.startswith(f"{PACKAGE}.{room}."):
            continue
        items = exported(package)
        parts.append(f"## `{package}`")
        parts += [f"::: {item.path}" for item in items if homes_of[origin(item)] == item]
        elsewhere = [item for item in items if homes_of[origin(item)] != item]
        if elsewhere:
            parts.append(f"Documented above or in another room:\n\n{listing(elsewhere, homes_of)}")
    return "\n\n".join(parts) + "\n"


def top_page() -> str:
    """The page of the names that `lightning_bayes` itself exports.

    Returns:
        Markdown: links by room, and the entries of what is in no room.
    """
    homes_of = homes()
    items = [homes_of[origin(item)] for item in exported(f"{PACKAGE}.public")]
    titles = {room: title for room, (title, _) in TITLES.items()} | {"errors": "Errors"}
    parts = [
        "# API reference",
        "`from lightning_bayes import ...` reaches these names. The pages of the rooms have everything public.",
    ]
    for room, title in titles.items():
        links = ", ".join(f"[`{item.name}`][{item.path}]" for item in items if room_of(item) == room)
        parts += [f"**[{title}]({room}.md)**: {links}"] if links else []
    parts += [f"::: {item.path}" for item in items if room_of(item) not in titles]
    return "\n\n".join(parts) + "\n"


def room_of(item: Exported) -> str:
    """The room of a name.

    Args:
        item: An exported name.

    Returns:
        The first part of its package below the top.
    """
    return item.package.split(".")[1]


def errors() -> list[Exported]:
    """The exception classes of `lightning_bayes.errors`.

    Returns:
        One entry a class.
    """
    module = f"{PACKAGE}.errors"
    path = source_of(module)
    classes = [node.name for node in tree_of(path).body if isinstance(node, ast.ClassDef)] if path else []
    return [Exported(module, name) for name in classes if not name.startswith("_")]


def errors_page() -> str:
    """The page of the exceptions.

    Returns:
        Markdown.
    """
    blocks = "\n\n".join(f"::: {item.path}" for item in errors())
    return f"# Errors\n\nEvery error of this package is a `BayesError`, and says what to do next.\n\n{blocks}\n"


def pages() -> dict[str, str]:
    """The whole API reference.

    Returns:
        Markdown by path below ``docs/``.
    """
    rooms = {f"api/{room}.md": room_page(room) for room in TITLES}
    return {"api/index.md": top_page(), **rooms, "api/errors.md": errors_page()}
