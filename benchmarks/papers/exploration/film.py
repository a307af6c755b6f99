"""A strip of frames of a trained policy.

    MUJOCO_GL=egl python -m benchmarks.papers.exploration.film --policy FILE.pt --out FILE.png [--frames 8] [--every 40]
        [--camera track]

The file is one that ``python -m benchmarks.papers.exploration --policy`` has written. MuJoCo renders without a screen by EGL
(``MUJOCO_GL=egl``) or by OSMesa (``MUJOCO_GL=osmesa``).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.papers.exploration.environments import Environments
from benchmarks.papers.exploration.figures import draw_strip
from benchmarks.papers.exploration.networks import Sizes, act


def film(policy: dict[str, Any], frames: int, every: int, camera: str | None = None) -> tuple[list[Any], list[str]]:
    """Run a policy without noise and keep some frames.

    Args:
        policy: Weights, sizes and environment.
        frames: How many frames.
        every: Time steps between them.
        camera: Name of a camera of MuJoCo's model, such as ``"track"``; None for the environment's.

    Returns:
        RGB arrays, and the time step and return so far of each.
    """
    view = {} if camera is None else {"camera_name": camera}
    environments = Environments(policy["environment"], [0], render_mode="rgb_array", **view)
    sizes = Sizes(*environments.sides, tuple(policy["hidden"]))
    observations, total = environments.reset_all(), 0.0
    kept, labels = [], []
    for number in range((frames - 1) * every + 1):
        if number % every == 0:
            kept.append(environments.render())
            labels.append(f"step {number}\nreturn {total:.0f}")
        found = environments.step(act(policy["weights"][None], sizes, observations[:, None])[:, 0])
        observations, total = found.observations, total + found.rewards.item()
        if found.ended[0]:
            break
    environments.close()
    return kept, labels


def main(arguments: list[str] | None = None) -> None:
    """Draw the strip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--every", type=int, default=40, help="time steps between frames")
    parser.add_argument("--camera", help="of MuJoCo's model; track follows the cheetah")
    options = parser.parse_args(arguments)
    policy = torch.load(options.policy, weights_only=True)
    frames, labels = film(policy, options.frames, options.every, options.camera)
    title = f"{policy['environment']}, {policy['title']}: test return {policy['return']:.0f}"
    draw_strip(frames, labels, title, options.out)


if __name__ == "__main__":
    main()
