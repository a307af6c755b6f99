from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.speed import memory
from benchmarks.speed.memory import ROOT, STATUS, available_bytes, measure_apart, parse_kib
from benchmarks.speed.setting import Setting

needs_proc = pytest.mark.skipif(not STATUS.exists(), reason="this system has no /proc/self/status")

PROGRAM = """
import torch
from benchmarks.speed.memory import PeakMemory, forget_peak
torch.ones(100 * 2**18)          # 100 MiB that are gone before the baseline
kept = torch.ones(20 * 2**18)
peak = PeakMemory("cpu")
torch.ones(64 * 2**18)           # 64 MiB that are gone before the reading
print(peak.added_mib(), int(forget_peak()))
"""


def test_reads_a_field_and_no_other():
    text = "Name:\tpython\nVmPeak:\t 9000 kB\nVmHWM:\t    4711 kB\nVmRSS:\t   1234 kB\n"
    assert parse_kib(text, "VmHWM") == 4711
    assert parse_kib(text, "VmRSS") == 1234
    assert parse_kib(text, "HWM") is None


@needs_proc
def test_sees_a_peak_that_is_gone_and_forgets_the_one_before():
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    added, cleared = map(float, done.stdout.split())
    if not cleared:
        pytest.skip("this system does not let a process forget its peak (/proc/self/clear_refs)")
    assert 63 < added < 66


@needs_proc
def test_measures_a_method_in_a_process_of_its_own():
    added, why = measure_apart("lenet", 2, "adam", Setting())
    assert why == ""
    assert 0.7 < added < 300  # Adam's two moments and the gradient alone are 3 × 62,006 × 4 bytes = 0.71 MiB


def test_a_process_that_fails_says_why():
    assert measure_apart("lenet", 2, "no-such-method", Setting()) == (None, "KeyError: 'no-such-method'")


def test_a_killed_process_is_named():
    done = subprocess.CompletedProcess([], returncode=-9, stdout="", stderr="")
    assert memory._last_words(done) == "the process was killed by signal 9; 9 often means out of memory"


@needs_proc
def test_knows_what_is_free():
    assert available_bytes("cpu") > 2**20
