"""Run inside a tree: import the package and print the inheritance of its classes as JSON.

The text of this file runs by ``python -c`` with the tree as working directory, so it imports nothing of the repository but
the package.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import warnings
from typing import Any

PACKAGE = "lightning_bayes"


def own_classes() -> set[type]:
    """Import every module of the package and collect the classes that it defines."""
    package = importlib.import_module(PACKAGE)
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    classes = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    return {cls for cls in classes if cls.__module__.startswith(PACKAGE)}


def inheritance(classes: set[type]) -> dict[str, Any]:
    """Count classes and levels of inheritance, and list the ends of the longest chains and the concrete parents."""

    def levels(cls: type) -> int:
        return 1 + max((levels(base) for base in cls.__bases__ if base in classes), default=0)

    parents = {base for cls in classes for base in cls.__bases__ if base in classes}
    concrete = {cls for cls in parents if not inspect.isabstract(cls) and not getattr(cls, "_is_protocol", False)}
    deepest = max(map(levels, classes))
    return {
        "classes": len(classes),
        "levels": deepest,
        "deepest": sorted(cls.__name__ for cls in classes if levels(cls) == deepest),
        "subclassed": sorted(f"{cls.__module__}.{cls.__name__}" for cls in concrete),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(inheritance(own_classes())))
