"""One HTML page that compares runs: ``lightning-bayes report RUN [RUN …]``.

It reads ``metrics.csv`` (of Lightning's CSVLogger), ``config.yaml``, the PNG files of ``EvaluationFigures`` and the names of
the checkpoints of each run. The page is self-contained and loads nothing from a server.
"""

from __future__ import annotations

from lightning_bayes.report.command import main, write_report
from lightning_bayes.report.runs import Run, changed_settings, read_run, read_runs

__all__ = ["Run", "changed_settings", "main", "read_run", "read_runs", "write_report"]
