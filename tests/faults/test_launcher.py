"""Ranks that Lightning starts itself, by calling the script again; every five seconds it looks for ended ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ddp, pytest.mark.slow]
ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, sys
from pathlib import Path
import injected_faults
from benchmarks.durable_run import Setting, run

def fault(trainer, passes):
    if passes == injected_faults.PASSES_BEFORE:
        Path(sys.argv[1], f"pass{trainer.global_rank}").touch()
    injected_faults.kill(trainer, passes, int(sys.argv[2]))

ranks = int(sys.argv[3])
run(Setting(Path(sys.argv[1]), ranks=ranks, fault=fault, answer_seconds=10.0), int(os.environ.get("LOCAL_RANK", 0)))
"""


@pytest.mark.parametrize(("victim", "ranks"), [(1, 2), (2, 4)])
def test_a_killed_rank_is_named_and_all_end_within_ten_seconds(victim, ranks, tmp_path):
    """By the first rank, which sees that the process has ended; or, where it waits for another one, by Lightning."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, "utf-8")
    places = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, str(script), str(tmp_path), str(victim), str(ranks)]
    with open(tmp_path / "log", "w", encoding="utf-8") as log:
        done = subprocess.run(command, env=places, stdout=log, stderr=log, timeout=300, check=False)
    ended, said = time.time(), (tmp_path / "log").read_text("utf-8")
    assert done.returncode, said
    assert ended - (tmp_path / f"pass{victim}").stat().st_mtime < 10
    by_us = f"RankError: Rank {victim} does not answer (of {ranks} ranks; seen on rank 0"
    by_lightning = rf"\[rank: {victim}\] Child process with PID \d+ terminated with code -9"
    assert by_us in said or (ranks > 2 and re.search(by_lightning, said)), said
