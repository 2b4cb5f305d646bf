"""Our work, and that of kornia, done in a process of its own.

A function prepares the work and returns the call that is timed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from matcher.collection.collection import Collection
from matcher.collection.reconstruction.reconstruct import ReconstructionError, reconstruct
from matcher.collection.store import Store
from matcher.lab.benchmark.opencv_pair import Work, resized
from matcher.lab.benchmark.references import kornia_lightglue, random_batch
from matcher.loading import load


def pair(images: list[str], size: tuple[int, int], points: int) -> Work:
    """One pair of arrays by the default preset; another call came before it."""
    pipe, arrays = load(device="cpu", max_keypoints=points), resized(images, size)
    pipe.match(*arrays)
    return lambda: {"matches": len(pipe.match(*arrays).points0)}


def collection(folder: str, run: str, points: int) -> Work:
    """All pairs of a folder whose features are stored: matched, verified and stored."""
    opened = Collection.open(run, device="cpu", max_keypoints=points, workers=0)
    opened.add_images(folder)
    opened.extract(everything=True)
    opened.add_pairs(exhaustive=True)
    return lambda: {"pairs": opened.run().matched}


def collection_kornia(points: int, pairs: int) -> Work:
    """So many pairs by kornia's LightGlue, with random parameters on random features; nothing is verified."""
    network = kornia_lightglue()
    sides = [random_batch(points, 1, torch.device("cpu"), seed) for seed in (0, 1)]
    data = {
        f"image{i}": {"keypoints": s.keypoints, "descriptors": s.descriptors, "image_size": s.size}
        for i, s in enumerate(sides)
    }

    @torch.inference_mode()
    def work() -> dict[str, Any]:
        for _ in range(pairs):
            network(data)
        return {"pairs": pairs}

    return work


def sfm(folder: str, run: str, threads: int) -> Work:
    """Photos to cameras and points, as `matcher sfm` does by default."""

    def work() -> dict[str, Any]:
        opened = Collection.open(run, device="cpu", workers=0)
        opened.add_images(folder)
        opened.add_pairs(exhaustive=True)
        opened.run()
        try:
            with Store.open(run) as store:
                model = reconstruct(store, Path(run) / "model", threads=threads).largest
        except ReconstructionError:
            return dict.fromkeys(("registered", "points", "track_length", "error"), 0)
        return {
            "registered": model.registered,
            "points": model.points,
            "track_length": model.mean_track_length,
            "error": model.mean_reprojection_error,
        }

    return work
