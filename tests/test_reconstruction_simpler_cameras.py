"""Mapping that begins with simpler cameras gives those that were asked for in the end."""

from types import SimpleNamespace

import numpy as np
import pytest
from collection_scene import centres, synthetic_store

from matcher.benchmark.rows import aligned
from matcher.export.colmap import CameraChoice
from matcher.sfm import mapping
from matcher.sfm.cameras import SIMPLE, enriched, have_few_images, simplified
from matcher.sfm.reconstruct import reconstruct

pycolmap = pytest.importorskip("pycolmap")


@pytest.fixture(scope="module", params=["RADIAL", "OPENCV", "FULL_OPENCV"])
def made(request, tmp_path_factory):
    """Ten images of unknown cameras of the asked kind, and the true poses."""
    store, poses = synthetic_store(np.random.default_rng(6), camera=None)
    out = tmp_path_factory.mktemp("sfm") / "model"
    choice = CameraChoice(model=request.param, sharing="single")
    return reconstruct(store, out, choice=choice, threads=1), poses, out, request.param


def job_of(out, tmp_path, **changes) -> dict:
    (tmp_path / "work").mkdir()
    job = {"database": str(out / "database.db"), "images": "absent", "output": str(tmp_path)}
    job |= {"mapper": "incremental", "poses": None, "rig": None, "fixed_cameras": [], "threads": 1}
    return job | {"seed": 0, "min_images": 3, "rig_known": True} | changes


def kinds(path) -> set[str]:
    with pycolmap.Database.open(str(path)) as database:
        return {camera.model.name for camera in database.read_all_cameras()}


def test_the_cameras_asked_for_are_adjusted_once_all_images_are_registered(made, tmp_path):
    """An empty model stands for one that could not grow."""
    _, poses, out, kind = made
    models = mapping._begun_simply(pycolmap, job_of(out, tmp_path), {})
    (model,) = models.values()
    assert {camera.model.name for camera in model.cameras.values()} == {kind}
    assert model.num_reg_images() == 10 and kinds(out / "database.db") == {kind}
    assert kinds(tmp_path / "work" / "simpler" / "simpler.db") == {SIMPLE}
    named = {model.image(number).name: model.image(number) for number in model.reg_image_ids()}
    found = np.array([named[name].projection_center() for name in sorted(named)])
    truth = centres(poses)
    largest = np.linalg.norm(truth[:, None] - truth, axis=2).max()
    assert np.linalg.norm(aligned(found, truth) - truth, axis=1).max() < 0.02 * largest
    assert model.compute_mean_reprojection_error() < 1


@pytest.mark.parametrize(
    "changes", [{"mapper": "global"}, {"poses": {}}, {"rig": "rig.json"}, {"fixed_cameras": [1]}]
)
def test_it_begins_so_only_where_cameras_are_unknown_and_nothing_else_is_given(made, tmp_path, changes):
    assert mapping._begun_simply(pycolmap, job_of(made[2], tmp_path, **changes), {}) == {}


def test_models_that_hold_half_of_the_images_stay(made, tmp_path):
    _, _, out, _ = made
    (number,) = [path.name for path in (out / "sparse").iterdir()]
    models = {0: pycolmap.Reconstruction(str(out / "sparse" / number))}
    assert not have_few_images(pycolmap, models, str(out / "database.db"))
    assert have_few_images(pycolmap, {}, str(out / "database.db"))
    assert mapping._begun_simply(pycolmap, job_of(out, tmp_path), models) == {}


def test_nothing_is_simpler_than_simple_cameras(tmp_path):
    store, _ = synthetic_store(np.random.default_rng(5), count=4, camera=None)
    reconstruct(store, tmp_path / "model", choice=CameraChoice(model=SIMPLE, sharing="single"), threads=1)
    assert simplified(pycolmap, str(tmp_path / "model" / "database.db"), tmp_path, set()) is None


def test_lens_distortion_is_carried_over(made, tmp_path):
    """The first coefficient means the same in all these models."""
    _, _, out, kind = made
    simple = simplified(pycolmap, str(out / "database.db"), tmp_path, set())
    with pycolmap.Database.open(str(simple)) as database:
        (camera,) = database.read_all_cameras()
    camera.params = [900.0, 500.0, 400.0, 0.05]
    model = pycolmap.Reconstruction()
    model.add_camera_with_trivial_rig(camera)
    enriched(pycolmap, model, str(out / "database.db"), set(), 1)
    rich = model.camera(camera.camera_id)
    assert rich.model.name == kind
    points = np.random.default_rng(0).uniform(-0.4, 0.4, (50, 2))
    points = np.column_stack([points, np.ones(50)])
    assert np.allclose(rich.img_from_cam(points), camera.img_from_cam(points))


def test_models_that_are_too_small_or_parts_of_others_are_left_out():
    class Model:
        def __init__(self, *names):
            self.names = names

        def num_reg_images(self):
            return len(self.names)

        def reg_image_ids(self):
            return self.names

        def image(self, name):
            pose = SimpleNamespace(matrix=lambda: np.eye(4)[:3])
            return SimpleNamespace(name=name, cam_from_world=lambda: pose)

    models = {0: Model(*"ab"), 1: Model(*"abcdef"), 2: Model(*"bcd"), 3: Model(*"fgh")}
    job = {"poses": None, "min_images": 3}
    assert [model.names for model in mapping._kept(models, job)] == [tuple("abcdef"), tuple("fgh")]
    assert len(mapping._kept(models, job | {"min_images": 4})) == 1
    assert len(mapping._kept(models, job | {"poses": {}})) == 4
