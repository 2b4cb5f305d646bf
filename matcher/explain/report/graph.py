"""Positions for the images of a run, so that those that match lie near each other."""

from __future__ import annotations

import numpy as np


def lay_out(count: int, edges: np.ndarray, weights: np.ndarray, rounds: int = 150) -> np.ndarray:
    """Lay out a graph by springs and repulsion (Fruchterman and Reingold 1991).

    Args:
        count: nodes n.
        edges: (E, 2) int64 of them.
        weights: (E,) above 0; heavier edges are shorter.
        rounds: steps, which become smaller and smaller.

    Returns:
        (n, 2) positions in [0, 1]², the same every time; they start on a ring in the order of the nodes.
    """
    turn = 2 * np.pi * np.arange(count) / max(1, count)
    positions = 0.5 + 0.4 * np.stack([np.sin(turn), -np.cos(turn)], axis=1)
    if count < 3 or not len(edges):
        return positions
    rest = 0.9 / np.sqrt(count)
    pull = weights / weights.max()
    for step in np.linspace(0.1, 0.002, rounds):
        apart = positions[:, None] - positions[None]
        square = np.maximum((apart**2).sum(-1), 1e-6)
        force = (apart * (rest**2 / square)[..., None]).sum(1)
        along = positions[edges[:, 0]] - positions[edges[:, 1]]
        drawn = along * (pull * np.linalg.norm(along, axis=1) / rest)[:, None]
        np.add.at(force, edges[:, 0], -drawn)
        np.add.at(force, edges[:, 1], drawn)
        force += (0.5 - positions) * 0.3  # parts that no edge joins stay on the page
        length = np.maximum(np.linalg.norm(force, axis=1, keepdims=True), 1e-9)
        positions = positions + force / length * np.minimum(length, step)
    low, high = positions.min(0), positions.max(0)
    return (positions - low) / np.maximum(high - low, 1e-9).max() + (
        1 - (high - low) / (high - low).max()
    ) / 2
