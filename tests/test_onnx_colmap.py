"""Files for COLMAP 4 have the names and shapes that it checks, and match what the pipeline matches.

COLMAP's wheels are built without ONNX Runtime, so what its extractor and matcher do with the files is done
here: padding to multiples of 32, scalars, keypoints from −1 to 1, points in the margin dropped.
"""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from runpy import run_path

import cv2
import numpy as np
import onnx
import onnxruntime
import pytest
from real_pairs import three_pairs

import matcher
from matcher.cli import main
from matcher.export_onnx import export_preset
from matcher.onnx_engine import Graph
from matcher.presets import PRESETS
from matcher.weights.files import read_manifest

pytestmark = pytest.mark.slow  # exporting takes minutes

EXTRACTOR = {
    "inputs": [("image", [-1, 3, -1, -1]), ("max_keypoints", []), ("min_score", [])],
    "outputs": [("keypoints", [-1, -1, -1]), ("descriptors", [-1, -1, 64]), ("scores", [-1, -1])],
}
MATCHER = {
    "inputs": [
        *((name, [-1, -1, -1]) for name in ("kpts0", "kpts1", "desc0", "desc1")),
        *((name, [-1, -1]) for name in ("image_size0", "image_size1")),
    ],
    "outputs": [("matches0", [-1]), ("mscores0", [-1])],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("colmap")
    command = ["weights", "export", "hybrid-learned", "--onnx", str(folder), "--colmap"]
    assert main(command) == 0
    return [folder / "colmap-learned.onnx", folder / "colmap-hybrid-learned.onnx"]


@pytest.mark.parametrize(("number", "wanted"), [(0, EXTRACTOR), (1, MATCHER)])
def test_names_ranks_and_types_are_those_that_colmap_checks(files, number, wanted):
    data = files[number].read_bytes()
    onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    for kind, ports in (("inputs", session.get_inputs()), ("outputs", session.get_outputs())):
        assert [port.name for port in ports] == [name for name, _ in wanted[kind]]
        for port, (_, shape) in zip(ports, wanted[kind], strict=True):
            assert len(port.shape) == len(shape)
            assert all(least in (-1, side) for side, least in zip(port.shape, shape, strict=True)), port
    types = {port.name: port.type for port in (*session.get_inputs(), *session.get_outputs())}
    whole = {name for name, kind in types.items() if kind == "tensor(int64)"}
    assert whole == ({"max_keypoints"} if number == 0 else {"matches0"})
    facts, row = session.get_modelmeta().custom_metadata_map, list(read_manifest().values())[number + 1]
    assert facts["package"] == f"matcher {matcher.__version__}" and facts["preset"] == "hybrid-learned"
    assert (facts["weights_sha256"], facts["weights_licence"]) == (row.sha256, row.licence)
    assert ("RGB, 0 to 1" in facts.get("image", "")) == (number == 0) and "centre" in facts["keypoints"]


def as_colmap(extractor: Graph, image: np.ndarray, most: int, least: float = 0.004):
    """Keypoints (N, 2), the corner of the first pixel being (0, 0), and descriptors of an RGB image."""
    height, width = image.shape[:2]
    padded = np.pad(image, ((0, -height % 32), (0, -width % 32), (0, 0)), mode="edge")
    found = extractor(
        image=np.ascontiguousarray(padded.transpose(2, 0, 1))[None].astype(np.float32) / np.float32(255),
        max_keypoints=np.array(most),
        min_score=np.array(least, np.float32),
    )
    scale = 0.5 * (np.array(padded.shape[1::-1], np.float32) - 1)
    keypoints = (found["keypoints"][0] + 1) * scale + 0.5
    inside = np.all((keypoints >= 0) & (keypoints < [width, height]), axis=1)
    return keypoints[inside].astype(np.float32), found["descriptors"][0][inside]


def matched(network: Graph, sides: list, sizes: list) -> np.ndarray:
    given = {}
    for number, ((keypoints, descriptors), size) in enumerate(zip(sides, sizes, strict=True)):
        given[f"kpts{number}"] = keypoints[None] - np.float32(0.5)
        given[f"desc{number}"] = descriptors[None]
        given[f"image_size{number}"] = np.array([size], np.float32)
    found = network(**given)
    assert found["matches0"].shape == found["mscores0"].shape == (len(sides[0][0]),)
    rows = np.flatnonzero(found["matches0"] >= 0)
    assert np.all(found["mscores0"][found["matches0"] < 0] == 0)
    assert np.all(found["mscores0"][rows] > 0)
    return np.stack([rows, found["matches0"][rows]], axis=1)


def as_colmap_and_as_the_pipeline(files: list, images: list, keypoints: int) -> list[np.ndarray]:
    """Matches (K, 4) of two RGB images."""
    extractor, network = (Graph(file.read_bytes(), {}) for file in files)
    sides = [as_colmap(extractor, image, keypoints) for image in images]
    pairs = matched(network, sides, [image.shape[1::-1] for image in images])
    theirs = np.concatenate([sides[i][0][pairs[:, i]] for i in (0, 1)], axis=1) - 0.5
    options = {"max_keypoints": keypoints, "resize": 2048, "further_passes": False, "refine": False}
    options |= {"early_exit": False, "pruning": False}  # the files have all layers
    matches = matcher.load("hybrid-learned", engine="onnx", **options).match(*images).matches
    return [theirs, np.concatenate([matches.points0, matches.points1], axis=1)]


def near(theirs: np.ndarray, ours: np.ndarray, pixels: float = 0.1) -> float:
    """The share of matches that are so near one of ours."""
    return np.mean(np.abs(theirs[:, None] - ours).max(axis=2).min(axis=1) < pixels)


# The padding of the second size changes what is normalised, and some of the 400 keypoints lie in it.
@pytest.mark.parametrize(("size", "share", "number"), [((320, 256), 0.99, 0.99), ((330, 250), 0.85, 0.8)])
@pytest.mark.parametrize("turns", [0, 1])
def test_the_matches_are_those_of_the_pipeline(files, views, turns, size, share, number):
    images = [cv2.cvtColor(cv2.imread(str(view)), cv2.COLOR_BGR2RGB) for view in views]
    images = [cv2.resize(image, size, interpolation=cv2.INTER_AREA) for image in images]
    images[1] = np.ascontiguousarray(np.rot90(images[1], turns))
    theirs, ours = as_colmap_and_as_the_pipeline(files, images, 400)
    assert len(ours) > 50
    assert near(theirs, ours) > share
    assert number < len(theirs) / len(ours) < 1.1


def test_three_real_pairs_match_as_in_the_pipeline(files):
    for name, pair in three_pairs().items():
        images = [cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB) for path in pair]
        theirs, ours = as_colmap_and_as_the_pipeline(files, images, 1024)
        assert near(theirs, ours) > 0.9 and 0.9 < len(theirs) / len(ours) < 1.1, name


def test_one_point_and_none(files):
    """COLMAP matches no image without keypoints."""
    extractor, network = (Graph(file.read_bytes(), {}) for file in files)
    keypoints, descriptors = as_colmap(extractor, np.full((40, 70, 3), 90, np.uint8), 100)
    assert keypoints.shape == (0, 2) and descriptors.shape == (0, 64)
    one = np.full((1, 2), 20, np.float32), np.eye(1, 64, dtype=np.float32)
    assert len(matched(network, [one, one], [(70, 40)] * 2)) <= 1


# --- OpenCV 5: `cv2.ALIKED` and `cv2.LightGlueMatcher`, as scripts/opencv_matcher.py uses them.


SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "opencv_matcher.py"
SIZE, POINTS = (640, 480), 512


@pytest.fixture(scope="module")
def by_opencv(tmp_path_factory):
    """Matches (K, 4) of two files by OpenCV and by the pipeline, both files made of one size before."""
    folder = tmp_path_factory.mktemp("opencv")
    command = ["weights", "export", "hybrid-learned", "--onnx", str(folder)]
    assert main([*command, "--opencv", "{}x{}".format(*SIZE)]) == 0
    match = run_path(SCRIPT)["match"]
    options = {"resize": max(SIZE), "further_passes": False, "refine": False, "max_keypoints": POINTS}
    pipeline = matcher.load("hybrid-learned", engine="onnx", **options)

    def of(pair: tuple[Path, Path]) -> tuple[np.ndarray, np.ndarray]:
        images = [cv2.resize(cv2.imread(str(path)), SIZE, interpolation=cv2.INTER_AREA) for path in pair]
        points0, points1, found = match(folder, *images, SIZE)
        places = [np.array([point.pt for point in points]) for points in (points0, points1)]
        theirs = np.array([[*places[0][m.queryIdx], *places[1][m.trainIdx]] for m in found])
        ours = pipeline.match(*(np.ascontiguousarray(image[..., ::-1]) for image in images)).matches
        return theirs, np.concatenate([ours.points0, ours.points1], axis=1)

    return of


@pytest.mark.skipif(not hasattr(cv2, "LightGlueMatcher"), reason="needs OpenCV 5")
def test_opencv_matches_with_our_weights_what_the_pipeline_matches(by_opencv):
    for name, pair in three_pairs().items():
        theirs, ours = by_opencv(pair)
        assert len(theirs) > 100, name
        assert near(theirs, ours, 0.5) > 0.85 and 0.9 < len(theirs) / len(ours) < 1.1, name


# --- scripts/cpp/match.cpp. Debian's libonnxruntime-dev, libjpeg-dev and libpng-dev hold the headers; where
# those of ONNX Runtime lie elsewhere, CPATH names the folder.


SOURCE = Path(__file__).resolve().parent.parent / "scripts" / "cpp" / "match.cpp"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
HEADERS = ["-I/usr/include/onnxruntime", "-I/usr/local/include/onnxruntime"]
NEEDED = "".join(
    f"#if !__has_include(<{name}>)\n#error {name}\n#endif\n"
    for name in ("onnxruntime_cxx_api.h", "jpeglib.h", "png.h")
)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The program, linked with the library that the Python package brings."""
    probe = [COMPILER, "-x", "c++", "-fsyntax-only", *HEADERS, "-"]
    if COMPILER is None or subprocess.run(probe, input=NEEDED, text=True, capture_output=True).returncode:
        pytest.skip("needs a C++ compiler and the headers named above")
    folder = tmp_path_factory.mktemp("cpp")
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"))
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (folder / name).symlink_to(library)
    command = [COMPILER, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", *HEADERS, SOURCE]
    command += ["-o", folder / "match", f"-L{folder}", f"-Wl,-rpath,{folder}"]
    subprocess.run([*command, "-lonnxruntime", "-ljpeg", "-lpng"], check=True)
    export_preset("hybrid-learned", PRESETS["hybrid-learned"], folder)

    def run(*arguments) -> subprocess.CompletedProcess:
        command = [folder / "match", folder / "learned.onnx", folder / "hybrid-learned.onnx", *arguments]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=os.environ)

    return run


@pytest.mark.parametrize(("ending", "pixels"), [("jpg", 1024), ("png", 320)])
def test_two_pictures_have_the_matches_that_python_finds(views, tmp_path, program, ending, pixels):
    files = []
    for view in views:
        files.append(tmp_path / f"{Path(view).stem}.{ending}")
        cv2.imwrite(str(files[-1]), cv2.imread(str(view)))
    done = program(*files, "300", str(pixels))
    assert done.returncode == 0, done.stderr
    theirs = np.array([line.split() for line in done.stdout.splitlines()], float)
    options = {"max_keypoints": 300, "resize": pixels, "further_passes": False, "refine": False}
    pipeline = matcher.load("hybrid-learned", engine="onnx", early_exit=False, pruning=False, **options)
    policy = replace(pipeline.matcher.config.policy, calibration=None)  # which is outside the graph
    pipeline.matcher.config = replace(pipeline.matcher.config, policy=policy)
    matches = pipeline.match(*files).matches
    ours = np.concatenate([matches.points0, matches.points1], axis=1)
    away = np.abs(theirs[:, None, :4] - ours).max(axis=2)
    same = away.min(axis=1) < 0.01
    assert len(ours) > 50
    assert 0.96 < len(theirs) / len(ours) < 1.04
    assert same.mean() >= 0.96  # decoding and resizing may round a pixel differently
    assert np.abs(theirs[same, 4] - matches.scores[away.argmin(axis=1)][same]).max() < 0.02
    cv2.imwrite(str(tmp_path / "flat.png"), np.full((60, 80, 3), 90, np.uint8))
    done = program(tmp_path / "flat.png", tmp_path / "flat.png")
    assert (done.returncode, done.stdout) == (0, "")


def test_a_file_that_cannot_be_used_is_named(views, tmp_path, program):
    (tmp_path / "cut.jpg").write_bytes(Path(views[0]).read_bytes()[:3000])
    (tmp_path / "text.jpg").write_text("no picture")
    for name, message in (
        ("absent.jpg", "cannot be opened"),
        ("text.jpg", "is neither a JPEG nor a PNG file"),
        ("cut.jpg", "the file is cut short or damaged"),
    ):
        done = program(views[0], tmp_path / name)
        assert done.returncode == 1
        assert f"{name}" in done.stderr and message in done.stderr
