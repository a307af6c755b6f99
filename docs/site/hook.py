"""MkDocs hook: adds the generated pages to the pages in ``docs/``."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the mkdocs command does not put the repository on the path

from docs.site import api, arguments, tutorials  # noqa: E402

WIDE = "api/arguments.md"  # a table of five columns
BEHIND_GUIDES = "---\nsearch:\n  boost: 0.3\nhide: [{}]\n---\n\n"  # the API reference has every word; guides come first


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to ``files``, and run the tutorials that have changed."""
    for path, text in (*api.pages().items(), ("api/arguments.md", arguments.page())):
        files.append(File.generated(config, path, content=BEHIND_GUIDES.format("toc" if path == WIDE else "") + text))
    for name in tutorials.names():
        for path in tutorials.cached(name):
            files.append(File.generated(config, f"tutorials/{path.name}", abs_src_path=str(path)))
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        files.append(File.generated(config, name.lower(), content=(ROOT / name).read_text("utf-8")))
    return files
