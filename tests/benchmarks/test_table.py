from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.speed.table import NOT_MEASURED, blocks, insert, main, render

ROOT = Path(__file__).parents[2]
RESULT = {
    "processor": "Some CPU",
    "device": "cpu",
    "threads": 2,
    "precision": "32",
    "rounds": 15,
    "torch": "2.15.0",
    "backpack-for-pytorch": "1.7.1",
    "opacus": "absent",
    "ivon-opt": "0.1.3",
    "commit": "abc1234",
    "environment": {"MALLOC_ARENA_MAX": "1"},
    "results": [
        {
            "model": "lenet",
            "batch": 32,
            "method": "adam",
            "seconds": 0.0123,
            "ratio": 1.0,
            "rounds": 15,
            "added_mib": 20.4,
        },
        {
            "model": "lenet",
            "batch": 32,
            "method": "ivon",
            "seconds": 0.02,
            "ratio": 1.626,
            "rounds": 3,
            "added_mib": 31.6,
        },
        {"model": "lenet", "batch": 32, "method": "opacus", "reason": "absent: pip install opacus"},
        {
            "model": "vgg16",
            "batch": 128,
            "method": "adam",
            "seconds": 1.0,
            "ratio": 1.0,
            "rounds": 15,
            "added_mib": None,
        },
        {
            "model": "vgg16",
            "batch": 128,
            "method": "ivon",
            "seconds": 2.0,
            "ratio": 2.0,
            "rounds": 15,
            "added_mib": 99.0,
        },
        {"model": "vgg16", "batch": 128, "method": "opacus", "reason": "absent: pip install opacus"},
    ],
}
TABLE = """\
Some CPU, 2 threads, precision 32, 15 interleaved rounds; torch 2.15.0, backpack-for-pytorch 1.7.1, opacus absent, ivon-opt \
0.1.3; commit abc1234; MALLOC_ARENA_MAX=1.

| Adam's step, and the ratio to it | batch | Adam | ivon-opt | Opacus GradSampleModule |
| --- | ---: | ---: | ---: | ---: |
| LeNet-5 | 32 | 12.3 ms | 1.63 | – |
| VGG16 | 128 | 1000.0 ms | 2.00 | – |

| Peak added memory in MiB | batch | Adam | ivon-opt | Opacus GradSampleModule |
| --- | ---: | ---: | ---: | ---: |
| LeNet-5 | 32 | 20 | 32 | – |
| VGG16 | 128 | – | 99 | – |

Slow methods took part in fewer rounds: ivon-opt on LeNet-5 at 32 (3).

Not run (–):

- Opacus GradSampleModule on LeNet-5 at 32, VGG16 at 128: absent: pip install opacus
"""


def test_shows_times_ratios_memory_and_what_was_not_run():
    assert render(RESULT) == TABLE


def test_the_command_prints_the_table(tmp_path, capsys):
    (tmp_path / "r.json").write_text(json.dumps(RESULT), "utf-8")
    main([str(tmp_path / "r.json")])
    assert capsys.readouterr().out == TABLE


def test_the_command_writes_between_the_comments_and_nowhere_else(tmp_path):
    result, document = tmp_path / "r.json", tmp_path / "d.md"
    result.write_text(json.dumps(RESULT), "utf-8")
    text = "Before\n<!-- table of {} -->\nold\n<!-- end of table -->\nAfter\n"
    document.write_text(text.format("other.json") + text.format("r.json"), "utf-8")
    for _ in range(2):  # a second time changes nothing
        main([str(result), "--write", str(document)])
        assert document.read_text("utf-8") == text.format("other.json") + text.format("r.json").replace("old\n", TABLE)


def test_a_document_without_the_comments_is_refused():
    text = "<!-- table of other.json -->\n<!-- end of table -->\n"
    with pytest.raises(SystemExit, match=r"No '<!-- table of r\.json -->' .+ \(it has: other\.json\)"):
        insert(text, "r.json", TABLE)


def test_no_memory_no_table_of_memory():
    rows = [{k: v for k, v in row.items() if k != "added_mib"} for row in RESULT["results"]]
    assert "Peak added memory" not in render({**RESULT, "results": rows})


def test_shows_the_shares_of_a_step_put_together():
    shares = {"statistics": 0.0625, "inversion": 0.25, "sampling": 0.03}
    row = {**RESULT["results"][1], "method": "noisy_kfac", "shares": shares, "quartiles": [1.5, 1.75]}
    assert (
        "| Shares of the mean step | batch | method | ratio, quartiles | statistics | inversion | sampling |\n"
        "| --- | ---: | --- | ---: | ---: | ---: | ---: |\n"
        "| LeNet-5 | 32 | Noisy K-FAC | 1.50 to 1.75 | 6.2% | 25.0% | 3.0% |\n"
    ) in render({**RESULT, "results": [RESULT["results"][0], row]})


def test_the_document_shows_what_the_command_prints():
    found = blocks((ROOT / "docs/speed.md").read_text("utf-8"))
    assert "speed_cpu.json" in found
    for name, content in found.items():
        result = ROOT / "benchmarks/results" / name
        expected = render(json.loads(result.read_text("utf-8"))) if result.exists() else NOT_MEASURED + "\n"
        assert content == expected, (
            f"run: python -m benchmarks.speed.table benchmarks/results/{name} --write docs/speed.md"
        )
