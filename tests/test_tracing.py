"""Scripts that make training views: traced rooms, and where sets of real photos are written."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from matcher.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def tracing(monkeypatch):
    """Modules of scripts/rooms/tracing by name."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "rooms")
    return lambda name: importlib.import_module(f"tracing.{name}")


def over_the_floor(cameras, at, target):
    return cameras.looking(np.array(at), np.array(target), 0.1, 500.0)


def depth_of_the_floor(camera):
    """(240, 320) z of the plane z = 0 at every second pixel."""
    grid = np.stack(np.meshgrid(np.arange(0, 640, 2.0), np.arange(0, 480, 2.0)), -1).reshape(-1, 2)
    rays = camera.rays(grid)
    with np.errstate(divide="ignore"):
        z = -camera.centre[2] / rays[:, 2]
    return np.where(z > 0, z, np.inf).reshape(240, 320)


def test_views_have_exact_depth_and_light_that_falls_off(tracing):
    for needed in ("embreex", "numba", "trimesh"):
        pytest.importorskip(needed)
    cameras, meshes, shading = (tracing(name) for name in ("cameras", "meshes", "shading"))
    floor = meshes.quad([(-9, -9, 0), (9, -9, 0), (9, 9, 0), (-9, 9, 0)], meshes.Material())
    lamp = shading.Lamp(np.array([0, 0, 1.0]), np.diag([0.02, 0.02, 0])[:2], np.ones(3), np.zeros(3))
    camera = over_the_floor(cameras, (-1.5, 0, 1.5), (0, 0, 0))
    colours, z = shading.Scene([floor]).draw(camera, shading.Lighting([lamp], [], np.zeros(3), 0.0))
    np.testing.assert_allclose(z, depth_of_the_floor(camera), rtol=1e-5)
    assert colours.shape == (959, 1279, 3) and np.isfinite(colours).all()
    assert colours[479, 639] == pytest.approx(
        0.7, rel=0.03
    )  # straight below the lamp: its light times the tint
    assert colours[900, 639].max() < 0.5 * colours[479, 639].min()
    assert shading.develop(colours, np.random.default_rng(0)).shape == (480, 640, 3)


def test_a_folder_that_is_no_set_is_never_replaced_and_finished_sets_are_kept(tmp_path, monkeypatch):
    """The photos' own folder was deleted where sets were asked for beside it."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "rooms")
    label = importlib.import_module("label_views")
    photos = tmp_path / "castle"
    photos.mkdir()
    (photos / "a.jpg").write_bytes(b"photo")
    with pytest.raises(UsageError, match="castle exists and is no finished set"):
        label.label_views(photos, photos, tmp_path / "work", print)
    assert (photos / "a.jpg").read_bytes() == b"photo"
    for name in ("house", "house-1", "house-2"):
        (tmp_path / name).mkdir()
    for name in ("house", "house-1"):
        (tmp_path / name / label.DONE).touch()
    found = label.label_views(photos, tmp_path / "house", tmp_path / "work", print)
    assert [folder.name for folder in found] == ["house", "house-1"]
