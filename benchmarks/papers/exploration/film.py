"""A strip of frames of a trained policy.

    MUJOCO_GL=egl python -m benchmarks.papers.exploration.film --policy FILE.pt --out FILE.png [--frames 8] [--every 40]
        [--camera track]

``python -m benchmarks.papers.exploration --policy`` writes the file. Without a screen, MuJoCo renders with EGL
(``MUJOCO_GL=egl``) or OSMesa (``MUJOCO_GL=osmesa``).
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
    """Run a policy without noise and record frames.

    Args:
        policy: Weights, sizes and environment.
        frames: Number of frames.
        every: Time steps between them.
        camera: Name of a camera of MuJoCo's model, such as ``"track"``; None for the environment's.

    Returns:
        RGB arrays, and labels with the time step and the return so far.
    """
    view = {} if camera is None else {"camera_name": camera}
    environments = Environments(policy["environment"], [0], render_mode="rgb_array", **view)
    sizes = Sizes(*environments.sides, tuple(policy["hidden"]))
    observations, total = environments.reset_all(), 0.0
    images, labels = [], []
    for number in range((frames - 1) * every + 1):
        if number % every == 0:
            images.append(environments.render())
            labels.append(f"step {number}\nreturn {total:.0f}")
        outcome = environments.step(act(policy["weights"][None], sizes, observations[:, None])[:, 0])
        observations, total = outcome.observations, total + outcome.rewards.item()
        if outcome.ended[0]:
            break
    environments.close()
    return images, labels


def main(arguments: list[str] | None = None) -> None:
    """Draw the strip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--every", type=int, default=40, help="time steps between frames")
    parser.add_argument("--camera", help="camera of the MuJoCo model; track follows the cheetah")
    options = parser.parse_args(arguments)
    policy = torch.load(options.policy, weights_only=True)
    frames, labels = film(policy, options.frames, options.every, options.camera)
    title = f"{policy['environment']}, {policy['title']}: test return {policy['return']:.0f}"
    draw_strip(frames, labels, title, options.out)


if __name__ == "__main__":
    main()
