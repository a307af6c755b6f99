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
from durable_run import Setting, run

def fault(trainer, passes):
    if passes == injected_faults.PASSES_BEFORE:
        Path(sys.argv[1], f"pass{trainer.global_rank}").touch()
    injected_faults.kill(trainer, passes, int(sys.argv[2]))

ranks = int(sys.argv[3])
run(Setting(Path(sys.argv[1]), ranks=ranks, fault=fault, answer_seconds=10.0), int(os.environ.get("LOCAL_RANK", 0)))
"""

TERMINATED = """
import os, sys
from pathlib import Path
import injected_faults
from durable_run import Setting, run

fault = getattr(injected_faults, sys.argv[2])
run(Setting(Path(sys.argv[1]), ranks=2, fault=fault), int(os.environ.get("LOCAL_RANK", 0)))
"""


def run_script(text, folder, *arguments):
    """Its exit code and what all of its processes said."""
    script = folder / "script.py"
    script.write_text(text, "utf-8")
    places = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, str(script), str(folder), *arguments]
    with open(folder / "log", "w", encoding="utf-8") as log:
        done = subprocess.run(command, env=places, stdout=log, stderr=log, timeout=300, check=False)
    return done.returncode, (folder / "log").read_text("utf-8")


@pytest.mark.parametrize("fault", ["terminate_rank_0", "terminate_rank_1", "terminate_all"])
def test_sigterm_ends_all_after_the_same_update(fault, tmp_path):
    """Lightning passes the first rank's signal on to the others, which have it by then."""
    _, said = run_script(TERMINATED, tmp_path, fault)
    assert [(tmp_path / f"passes{rank}").read_text() for rank in range(2)] == ["8", "8"], said
    assert (tmp_path / "within.ckpt").exists()
    assert "RankError" not in said


@pytest.mark.parametrize(("victim", "ranks"), [(1, 2), (2, 4)])
def test_a_killed_rank_is_named_and_all_end_within_ten_seconds(victim, ranks, tmp_path):
    """By the first rank, which sees that the process has ended; or, where it waits for another one, by Lightning."""
    code, said = run_script(SCRIPT, tmp_path, str(victim), str(ranks))
    ended = time.time()
    assert code, said
    assert ended - (tmp_path / f"pass{victim}").stat().st_mtime < 10
    by_us = f"RankError: Rank {victim} does not answer (of {ranks} ranks; seen on rank 0"
    by_lightning = rf"\[rank: {victim}\] Child process with PID \d+ terminated with code -9"
    assert by_us in said or (ranks > 2 and re.search(by_lightning, said)), said
