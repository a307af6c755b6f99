"""Some of the kills at random moments: resumed runs end at the bits of one that nothing happened to."""

from __future__ import annotations

import json

import pytest

from benchmarks.kills import main


@pytest.mark.ddp
@pytest.mark.slow
def test_runs_that_are_killed_at_random_moments_go_on_to_the_same_bits(tmp_path):
    file = tmp_path / "kills.json"
    main(["--kills", "4", "--seed", "1", "--json", str(file)])
    found = json.loads(file.read_text("utf-8"))
    assert len(found["kills"]) == 4
    for row in found["kills"]:
        assert row["same_bits"]
        assert row["named"]
        assert not row["unreadable"]
        assert row["seconds_until_all_ended"] < 10
    for row in found["world_sizes"]:
        assert 0 < row["moved_at_updates"][0] < row["moved_at_updates"][1]
        assert row["largest_difference"] < 2e-6
