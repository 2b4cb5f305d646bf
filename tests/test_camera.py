"""The pixel convention; cameras, what is accepted as one, and points of distorting lenses."""

import json
import re
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

import matcher
from matcher.cameras import (
    CAMERA_MODELS,
    COLMAP_IMAGES,
    Camera,
    as_camera,
    parse_cameras,
    read_baseline,
    read_cameras,
    read_named_poses,
)
from matcher.config import EstimationConfig
from matcher.errors import UsageError
from matcher.geometry import inside, resize_points, resized, warp_points
from matcher.verify.adjustment import undistort
from matcher.verify.estimation import RobustEstimator

K = np.array([[800.0, 0, 511.5], [0, 820.0, 383.5], [0, 0, 1]])
NUMBERS = [800, 820, 511.5, 383.5]


@pytest.mark.parametrize("given", [Camera(*NUMBERS), NUMBERS, np.array(NUMBERS), K.tolist()])
def test_lists_arrays_and_matrices_become_cameras(given):
    camera = Camera(*NUMBERS)
    assert as_camera(given, "camera0") == camera == as_camera({"K": camera.K})
    lens = {"size": (1024, 768), "model": "OPENCV", "distortion": [-0.3, 0.1, 0, 0]}
    assert as_camera({"K": K} | lens) == as_camera(vars(camera) | lens) == replace(camera, **lens)


WITH_MORE = {"K": K, "k1": -0.3}, {"K": K, "fx": 800}, {"K": K, "distortion": [-0.3, 0.1, 0, 0]}


@pytest.mark.parametrize("given", [[800, 800, 1], "800,800,1,1", K.T, np.full((3, 3), np.nan), *WITH_MORE])
def test_other_things_are_refused_at_once(given):
    with pytest.raises(UsageError, match="camera0"):
        as_camera(given, "camera0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fx": 0}, "focal lengths"),
        ({"cx": np.inf}, "cx"),
        ({"model": "OPENCV"}, "4 distortion"),
        ({"model": "RADIAL", "distortion": (0.1, 0.1), "fy": 801}, "one focal length"),
        ({"size": (0, 3)}, "size"),
        ({"size": (np.inf, 3)}, "size"),
        ({"distortion": [[0.1], [0.1, 0.2]]}, "distortion"),
    ],
)
def test_impossible_cameras_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Camera(**({"fx": 800, "fy": 800, "cx": 1, "cy": 1} | options))
    for model, params in (("PINHOLE", [1, 2, 3]), ("LENS", [1, 2, 3]), (["LENS"], "a")):
        with pytest.raises(UsageError, match=model[0]):
            Camera.from_colmap(model, params)


def test_one_camera_is_of_images_of_one_size(views):
    pipeline = matcher.load("nearest", geometry="essential", max_keypoints=100)
    given = zip(views, (400, 200), strict=True)
    large, half = (matcher.read_image(view, resize=size).pixels for view, size in given)
    with pytest.raises(matcher.UsageError, match=r"400 x 300 and 200 x 150 pixels, .* give camera1, too"):
        pipeline.match(large, half, camera0=(350, 350, 200, 150))
    pipeline.match(large, half, camera0=(350, 350, 200, 150), camera1=(175, 175, 100, 75))


def test_one_camera_in_every_form(tmp_path):
    """Each says the same in the pixel origin of its program."""
    pycolmap = pytest.importorskip("pycolmap")
    numbers = [500, 510, 320, 240, 0.1, 0.02, 0.001, 0.002]
    wanted = Camera(500, 510, 319.5, 239.5, (640, 480), "OPENCV", (0.1, 0.02, 0.001, 0.002))
    model = pycolmap.Reconstruction()
    model.add_camera(pycolmap.Camera(model="OPENCV", width=640, height=480, params=numbers, camera_id=7))
    model.write_binary(tmp_path)
    model.write_text(tmp_path)
    storage = cv2.FileStorage(str(tmp_path / "c.yml"), cv2.FILE_STORAGE_WRITE)
    storage.write("image_width", 640)
    storage.write("image_height", 480)
    storage.write("camera_matrix", wanted.K)
    storage.write("distortion_coefficients", np.array([[0.1, 0.02, 0.001, 0.002, 0.0]]))
    storage.release()
    files = (tmp_path / name for name in ("cameras.txt", "cameras.bin", "c.yml"))
    for given in ("OPENCV,640,480," + ",".join(map(str, numbers)), *files):
        assert parse_cameras(str(given)) == wanted, given
    assert parse_cameras("500, 510, 319.5, 239.5") == Camera(500, 510, 319.5, 239.5)


LENSES = (  # of nerfstudio; the model that is the same, None: there is none
    ({}, "OPENCV", (0.1, 0, 0, 0)),
    ({"camera_model": "SIMPLE_PINHOLE", "k2": 0.2, "p1": 3, "p2": 4}, "OPENCV", (0.1, 0.2, 3, 4)),
    ({"k3": 0.3}, "FULL_OPENCV", (0.1, 0, 0, 0, 0.3, 0, 0, 0)),
    ({"camera_model": "OPENCV_FISHEYE", "k3": 0.3}, "OPENCV_FISHEYE", (0.1, 0, 0.3, 0)),
    ({"is_fisheye": True}, "OPENCV_FISHEYE", (0.1, 0, 0, 0)),
    ({"camera_model": ["EQUIRECTANGULAR"]}, None, "EQUIRECTANGULAR.* cannot be used"),
    ({"frames": [{"file_path": "images/a.jpg"}, {"file_path": "a.jpg"}]}, None, "'images/a.jpg' and 'a.jpg'"),
    ({"k4": 0.3}, None, "k4"),
    ({"frames": [{"transform_matrix": 0}]}, None, "lacks 'file_path'"),
    ({"frames": ["a.jpg"]}, None, "kind that is due"),
)


@pytest.mark.parametrize(("more", "model", "lens"), LENSES)
def test_cameras_and_poses_of_nerfstudio(tmp_path, more, model, lens):
    world_from_cam = [[1, 0, 0, 4], [0, 0, -1, 5], [0, 1, 0, 6], [0, 0, 0, 1]]  # level, along y; z is up
    frames = [{"file_path": "./images/a/b.jpg", "transform_matrix": world_from_cam}]
    values = {"fl_x": 500, "fl_y": 510, "cx": 320, "cy": 240, "w": 640, "h": 480, "k1": 0.1, "frames": frames}
    (path := tmp_path / "transforms.json").write_text(json.dumps(values | more))
    if model is None:
        for read in (read_cameras, read_named_poses):
            with pytest.raises(UsageError, match=rf"transforms\.json.*{lens}"):
                read(path)
        return
    wanted, (poses, cameras) = Camera(500, 510, 319.5, 239.5, (640, 480), model, lens), read_named_poses(path)
    assert cameras == {"a/b.jpg": wanted} and read_cameras(path) == wanted
    assert (poses["a/b.jpg"] @ [4, 7, 7, 1]).tolist() == [0, -1, 2, 1]  # 2 ahead, 1 above


@pytest.mark.parametrize(
    ("name", "line"), [("poses.txt", "{} 1 0 0 0 0 0 {}"), (COLMAP_IMAGES, "1 1 0 0 0 0 0 {1} 1 {0}\n")]
)
def test_two_poses_of_one_image_are_refused(tmp_path, name, line):
    (path := tmp_path / name).write_text("\n".join(line.format("a.jpg", x) for x in (1, 2)))
    with pytest.raises(UsageError, match=rf"{name}.*two lines.*a\.jpg"):
        read_named_poses(path)


INFO = """image_width: 640
image_height: 480
camera_matrix: {rows: 3, cols: 3, data: [500, 0, 319.5, 0, 510,
  239.5, 0, 0, 1]}
distortion_model: plumb_bob
distortion_coefficients:
  rows: 1
  data: [0.1, 2.0e-2, 0.001, .002, 0] # k1, k2, t1, t2, k3
P: [9, 0, 9, 0]
"""
EUROC = re.sub(r"image_(.|\n)*model: plumb_bob", """resolution: [640, 480]
camera_model: pinhole
intrinsics: [500, 510, 319.5, 239.5]
distortion_model: radial-tangential""", INFO)  # fmt: skip
FISHEYE = re.sub(r"(?m)^camera_matrix.*\n.*\n", "k:\n{}\n", INFO).replace("plumb_bob", '"equidistant"')
FISHEYE = FISHEYE.format("\n".join(f"- {value}" for value in (500.0, 0, 319.5, 0, 510.0, 239.5, 0, 0, 1)))
ROWS = [f"500 0 319.5 {500 * x} 0 510 239.5 0 0 0 1 0" for x in (0, -0.5, 0.1, -0.3)]


def test_cameras_of_robots(tmp_path):
    path, lens = tmp_path / "c.yaml", (0.1, 0.02, 0.001, 0.002)
    for text, model in ((INFO, "OPENCV"), (EUROC, "OPENCV"), (FISHEYE, "OPENCV_FISHEYE")):
        path.write_text(text)
        assert parse_cameras(str(path)) == Camera(500, 510, 319.5, 239.5, (640, 480), model, lens)
    for text in (INFO.replace("plumb", "plum"), INFO.replace("matrix", "name"), EUROC.replace("pin", "key")):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"c\.yaml"):
            parse_cameras(str(path))
    path = tmp_path / "calib.txt"
    for rows in (ROWS, [f"P{i}: {row}" for i, row in enumerate(ROWS)], [f"P_rect_03: {ROWS[3]}", "Tr: 1"]):
        path.write_text("\n".join(rows))
        assert parse_cameras(str(path)) == Camera(500, 510, 319.5, 239.5)
    known = (2, "lr", 0.5), (4, ("02/data", "03/data"), 0.4), (4, "32", None), (4, "lr", None)
    for count, names, metres in known:
        path.write_text("\n".join(ROWS[:count]))
        assert read_baseline(path, *map(Path, names)) == (metres and pytest.approx(metres))
    path.write_text("\n".join([*ROWS, ROWS[0].replace("500", "600")]))
    with pytest.raises(UsageError, match="differ"):
        parse_cameras(str(path))
    path.write_bytes(b"\xff\x00\x81")
    with pytest.raises(UsageError, match=r"calib\.txt"):
        read_baseline(path, path, path)


def test_cameras_by_name(tmp_path):
    intrinsics = {"cx": 320, "cy": 240, "w": 640, "h": 480}
    frames = [{"file_path": f"images/{n}.jpg", "fl_x": 500 + n, **intrinsics} for n in (1, 2)]
    common = {"fl_x": 503, **intrinsics, "frames": [*frames, {"file_path": "3.jpg"}]}  # of the last alone
    (tmp_path / "transforms.json").write_text("\ufeff" + json.dumps(common), "utf-8")
    found = parse_cameras(str(tmp_path / "transforms.json"))
    assert {name: camera.fx for name, camera in found.items()} == {"1.jpg": 501, "2.jpg": 502, "3.jpg": 503}
    names = ("a.jpg", "in b/c  d.jpg", '"e f.jpg"')
    lines = [f"{n} PINHOLE 640 480 500 500 320 240\n" for n in names]
    (tmp_path / "list.txt").write_text("".join(lines), "utf-16")
    assert list(parse_cameras(str(tmp_path / "list.txt"))) == ["a.jpg", "in b/c  d.jpg", "e f.jpg"]
    (tmp_path / "cameras.txt").write_text("1 PINHOLE 6 4 5 5 3 2\n2 PINHOLE 6 4 5 5 3 2\n")
    (cut := tmp_path / "camera.xml").write_text("<opencv_storage><a")
    for given in ("1,2,3", "PINHOLE", "PINHOLE,6,4,5", tmp_path / "cameras.txt", cut, "no.yml"):
        with pytest.raises(UsageError, match="4 parameters" if "PINH" in str(given) else "camera") as fault:
            parse_cameras(str(given))
        assert "_from" not in str(fault.value)


# --- Distorting lenses, against COLMAP's own models.


def seen(camera: Camera, rays: np.ndarray) -> np.ndarray:
    """Stored pixels (N, 2) of rays (N, 2) at depth 1, by COLMAP."""
    pycolmap = pytest.importorskip("pycolmap")
    model, params = camera.to_colmap()
    lens = pycolmap.Camera(model=model, width=1024, height=768, params=params)
    return lens.img_from_cam(np.column_stack([rays, np.ones(len(rays))])) - 0.5


@pytest.mark.parametrize("model", CAMERA_MODELS)
def test_every_model_is_inverted(model, rng):
    fy = 800.0 if CAMERA_MODELS[model][0] == 1 else 820.0
    lens = (0.8,) if model == "FOV" else [-0.15 * (-0.2) ** i for i in range(CAMERA_MODELS[model][1])]
    camera = Camera(800.0, fy, 511.5, 383.5, (1024, 768), model, lens)
    assert Camera.from_colmap(*camera.to_colmap(), (1024, 768)) == camera
    rays = rng.uniform([-0.55, -0.42], [0.55, 0.42], (300, 2))
    found = undistort(seen(camera, rays), camera)
    np.testing.assert_allclose(found, rays * (camera.fx, camera.fy) + (camera.cx, camera.cy), atol=1e-3)
    assert undistort(np.zeros((0, 2)), camera).shape == (0, 2)


def test_a_pose_needs_the_distortion(rng):
    camera = Camera(800.0, 800.0, 511.5, 383.5, (1024, 768), "RADIAL", (-0.35, 0.12))
    world = rng.uniform([-3, -2, 5], [3, 2, 9], (400, 3))
    angle = np.radians(8)
    rotation = np.array([[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]])
    moved = world @ rotation.T + [1.0, 0.1, 0.2]
    points = [seen(camera, p[:, :2] / p[:, 2:]) + rng.normal(0, 0.3, (400, 2)) for p in (world, moved)]
    estimator = RobustEstimator(EstimationConfig(kind="essential"))

    def off(given: Camera) -> tuple[float, int]:
        found = estimator(*points, cameras=(given, given))
        cosine = (np.trace(found.cam1_from_cam0[:3, :3] @ rotation.T) - 1) / 2
        return float(np.degrees(np.arccos(np.clip(cosine, -1, 1)))), int(found.inliers.sum())

    right, plain = off(camera), off(Camera(800.0, 800.0, 511.5, 383.5))
    assert right[0] < 0.2 and right[1] > 390
    assert plain[1] < right[1] - 20


# --- The pixel convention.


@pytest.mark.parametrize(
    ("size", "longer_side", "expected"),
    [
        ((4000, 3000), 1024, (1024, 768)),
        ((3000, 4001), 1024, (768, 1024)),
        ((640, 480), 1024, (640, 480)),
        ((640, 480), None, (640, 480)),
        ((10000, 3), 100, (5000, 2)),
        ((12000, 400), 1024, (4857, 162)),
    ],
)
def test_resized_is_only_ever_smaller(size, longer_side, expected) -> None:
    new, scale = resized(size, longer_side)
    assert new == expected
    assert scale == (expected[0] / size[0], expected[1] / size[1])


def test_resize_points_is_what_resizing_does() -> None:
    new, scale = resized((301, 201), 100)
    assert scale[0] != scale[1]  # rounding makes the axes differ
    y, x = np.mgrid[:201, :301]
    blob = np.exp(-((x - 120.3) ** 2 + (y - 77.8) ** 2) / (2 * 15.0**2))
    small = cv2.resize(blob, new, interpolation=cv2.INTER_AREA)
    y, x = np.mgrid[: new[1], : new[0]]
    centroid = np.array([(x * small).sum(), (y * small).sum()]) / small.sum()
    np.testing.assert_allclose(centroid, resize_points(np.array([120.3, 77.8]), scale), atol=0.01)


def test_warp_points_is_the_projection_and_nan_behind_the_horizon(rng: np.random.Generator) -> None:
    homography = np.array([[0.9, 0.1, 20], [-0.05, 1.1, -7], [1e-4, -2e-4, 1]])
    points = rng.uniform(0, 500, (25, 2))
    expected = cv2.perspectiveTransform(points[None], homography)[0]
    np.testing.assert_allclose(warp_points(points, homography), expected, atol=1e-9)
    back = warp_points(warp_points(points, homography), np.linalg.inv(homography))
    np.testing.assert_allclose(back, points, atol=1e-8)
    homography = np.array([[1, 0, 0], [0, 1, 0], [0.01, 0, -1.0]])
    warped = warp_points(np.array([[50.0, 0], [100, 0], [200, 10]]), homography)
    assert np.isnan(warped[:2]).all()
    np.testing.assert_allclose(warped[2], [200, 10])


def test_inside_is_the_area_of_the_pixels() -> None:
    points = np.array([[-0.5, -0.5], [9.5, 4.5], [-0.51, 0], [9.51, 0], [0, 4.51], [np.nan, 0], [3, 2]])
    assert inside(points, (10, 5)).tolist() == [True, True, False, False, False, False, True]
