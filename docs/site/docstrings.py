"""Griffe extension that renames ``Example:`` sections to ``Examples:``, so that doctests are rendered as code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class DoctestSections(griffe.Extension):
    """Renames ``Example:`` sections before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
