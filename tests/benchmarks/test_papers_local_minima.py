from __future__ import annotations

import json
import math

import torch

from benchmarks.papers.local_minima import FLAT, adagrad, landscape, main, noisy_landscape, summary, tracks


def test_the_landscape_is_the_papers():
    x, y = 0.3, -0.8
    first = x * math.sin(20 * y) + y * math.sin(20 * x)
    second = x * math.cos(10 * y) - y * math.sin(10 * x)
    expected = 1 - math.exp(-(first**2) - second**2)
    torch.testing.assert_close(landscape(torch.tensor([x, y])), torch.tensor(expected))


def test_the_origin_is_flat_and_the_end_of_its_line_is_not():
    flat, narrow = noisy_landscape(torch.tensor([[0.0, 0.0], [0.0, 0.9]]))
    assert flat < FLAT < narrow


def test_adagrad_is_torchs():
    """A weight of 1 - β₂ = 0.1 on g² and a first accumulator of 10 are, over 0.1, torch's 1 and 100."""
    start = torch.tensor([[0.4, -0.7]])
    point = start.clone().requires_grad_()
    theirs = torch.optim.Adagrad([point], lr=0.05 / math.sqrt(0.1), initial_accumulator_value=100.0, eps=0.0)
    for found in adagrad(start, 50):
        theirs.zero_grad()
        landscape(point).sum().backward()
        theirs.step()
        torch.testing.assert_close(found, point.detach(), rtol=1e-4, atol=1e-5)


def test_annealed_noise_finds_the_flat_minimum_more_often():
    descent, adaptive, annealed, noiseless = (summary(way[-1])["flat"] for way in tracks(50, 1000).values())
    assert annealed > max(descent, adaptive, noiseless) + 0.2


def test_command_writes_table_figure_and_json(tmp_path, capsys):
    figure, result = tmp_path / "f.png", tmp_path / "r.json"
    main(["--starts", "5", "--updates", "20", "--out", str(figure), "--json", str(result)])
    assert "gradient descent" in capsys.readouterr().out
    assert len(json.loads(result.read_text("utf-8"))["results"]) == 4
    assert figure.read_bytes().startswith(b"\x89PNG")
