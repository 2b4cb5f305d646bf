"""Cameras: what is accepted, COLMAP's parameters and pixel origin."""

import json

import cv2
import numpy as np
import pytest

import matcher
from matcher.cameras import CAMERA_MODELS, Camera, as_camera, parse_cameras
from matcher.errors import UsageError

K = np.array([[800.0, 0, 511.5], [0, 820.0, 383.5], [0, 0, 1]])


def test_k_and_back():
    camera = Camera.from_K(K, size=(1024, 768))
    np.testing.assert_array_equal(camera.K, K)
    assert camera == Camera(800, 820, 511.5, 383.5, size=(1024, 768))
    assert all(type(value) is float for value in camera.params)


@pytest.mark.parametrize(
    "given",
    [
        Camera(800, 820, 511.5, 383.5),
        [800, 820, 511.5, 383.5],
        np.array([800, 820, 511.5, 383.5]),
        K.tolist(),
    ],
)
def test_lists_arrays_and_matrices_become_cameras(given):
    assert as_camera(given, "camera0") == Camera(800, 820, 511.5, 383.5)


@pytest.mark.parametrize("given", [[800, 800, 1], "800,800,1,1", K.T, np.full((3, 3), np.nan)])
def test_other_things_are_refused_at_once(given):
    with pytest.raises(UsageError, match=r"camera0|K must be|camera's"):
        as_camera(given, "camera0")


@pytest.mark.parametrize("model", CAMERA_MODELS)
def test_parameters_in_colmaps_order(model):
    focals, more = CAMERA_MODELS[model]
    params = [900.0, 950.0][:focals] + [512.0, 384.0] + [0.01 * (i + 1) for i in range(more)]
    camera = Camera.from_colmap(model, params, (1024, 768))
    assert (camera.fx, camera.fy) == (900.0, 950.0 if focals == 2 else 900.0)
    assert (camera.cx, camera.cy) == (511.5, 383.5)
    assert camera.to_colmap() == (model, tuple(params))
    pycolmap = pytest.importorskip("pycolmap")
    reference = pycolmap.Camera(model=model, width=1024, height=768, params=params)
    np.testing.assert_allclose(
        reference.calibration_matrix() - camera.K, [[0, 0, 0.5], [0, 0, 0.5], [0, 0, 0]]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fx": 0}, "focal lengths"),
        ({"cx": np.inf}, "cx"),
        ({"model": "OPENCV"}, "4 distortion"),
        ({"model": "RADIAL", "distortion": (0.1, 0.1), "fy": 801}, "one focal length"),
        ({"size": (0, 3)}, "size"),
    ],
)
def test_impossible_cameras_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Camera(**({"fx": 800, "fy": 800, "cx": 1, "cy": 1} | options))
    for model, params in (("PINHOLE", [1, 2, 3]), ("LENS", [1, 2, 3])):
        with pytest.raises(UsageError, match=model):
            Camera.from_colmap(model, params)


def test_one_camera_is_of_images_of_one_size(views):
    pipeline = matcher.load("nearest", geometry="essential", max_keypoints=100)
    large, half = (
        matcher.read_image(views[number], resize=size).pixels for number, size in enumerate((400, 200))
    )
    with pytest.raises(matcher.UsageError, match=r"400 x 300 and 200 x 150 pixels, .* give camera1, too"):
        pipeline.match(large, half, camera0=(350, 350, 200, 150))
    result = pipeline.match(large, half, camera0=(350, 350, 200, 150), camera1=(175, 175, 100, 75))
    with pytest.raises(matcher.UsageError, match="give camera1, too"):
        pipeline.verify(result.features0, result.features1, result.matches, camera0=(350, 350, 200, 150))


def write_opencv(path):
    storage = cv2.FileStorage(str(path), cv2.FILE_STORAGE_WRITE)
    storage.write("image_width", 640)
    storage.write("image_height", 480)
    storage.write("camera_matrix", np.array([[500, 0, 319.5], [0, 510, 239.5], [0, 0, 1.0]]))
    storage.write("distortion_coefficients", np.array([[0.1, 0.02, 0.001, 0.002, 0.0]]))
    storage.release()


def test_one_camera_in_every_form(tmp_path):
    """Each says the same in the pixel origin of its program."""
    pycolmap = pytest.importorskip("pycolmap")
    numbers = [500, 510, 320, 240, 0.1, 0.02, 0.001, 0.002]
    wanted = Camera(500, 510, 319.5, 239.5, (640, 480), "OPENCV", (0.1, 0.02, 0.001, 0.002))
    model = pycolmap.Reconstruction()
    model.add_camera(pycolmap.Camera(model="OPENCV", width=640, height=480, params=numbers, camera_id=7))
    model.write_binary(tmp_path)
    model.write_text(tmp_path)
    names = ("fl_x", "fl_y", "cx", "cy", "k1", "k2", "p1", "p2")
    shared = dict(zip(names, numbers, strict=True), w=640, h=480)
    frames = [{"file_path": "images/a.jpg"}]
    (tmp_path / "transforms.json").write_text(json.dumps({**shared, "frames": frames}))
    write_opencv(tmp_path / "c.yml")
    files = (tmp_path / name for name in ("cameras.txt", "cameras.bin", "transforms.json", "c.yml"))
    for given in ("OPENCV,640,480," + ",".join(map(str, numbers)), *files):
        assert parse_cameras(str(given)) == wanted, given
    assert parse_cameras("500, 510, 319.5, 239.5") == Camera(500, 510, 319.5, 239.5)


def test_cameras_by_name(tmp_path):
    intrinsics = {"cx": 320, "cy": 240, "w": 640, "h": 480}
    frames = [{"file_path": f"images/{n}.jpg", "fl_x": 500 + n, **intrinsics} for n in (1, 2)]
    (tmp_path / "transforms.json").write_text(json.dumps({"frames": frames}))
    found = parse_cameras(str(tmp_path / "transforms.json"))
    assert {name: camera.fx for name, camera in found.items()} == {"1.jpg": 501, "2.jpg": 502}
    (tmp_path / "list.txt").write_text("a.jpg PINHOLE 640 480 500 500 320 240\n")
    assert list(parse_cameras(str(tmp_path / "list.txt"))) == ["a.jpg"]
    (tmp_path / "cameras.txt").write_text("1 PINHOLE 6 4 5 5 3 2\n2 PINHOLE 6 4 5 5 3 2\n")
    for given in ("1,2,3", "PINHOLE,6,4,5", tmp_path / "cameras.txt", "no.yml"):
        with pytest.raises(UsageError, match=r"camera|cameras\.txt"):
            parse_cameras(str(given))
