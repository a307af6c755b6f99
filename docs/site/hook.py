"""The hook of ``mkdocs.yml``: adds the generated pages to those in ``docs/``."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs itself may run as a command, without the repository on the path

from docs.site import api, tutorials  # noqa: E402


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages, and run the tutorials that have changed.

    Args:
        files: The files in ``docs/``.
        config: The site's settings.

    Returns:
        The same files and the generated ones.
    """
    for path, text in api.pages().items():
        files.append(File.generated(config, path, content=text))
    for name in tutorials.names():
        for path in tutorials.cached(name):
            files.append(File.generated(config, f"tutorials/{path.name}", abs_src_path=str(path)))
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        files.append(File.generated(config, name.lower(), content=(ROOT / name).read_text("utf-8")))
    return files
