"""Results of papers, one script each; `PUBLISHED` has the tables that they printed."""

import json
from pathlib import Path
from typing import Any, Final

PUBLISHED: Final[dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text("utf-8"))
