"""Find the pair sets of a name, a folder or a list of pairs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from matcher.errors import UsageError
from matcher.evaluate import folders, multiview
from matcher.evaluate.protocols import PairSet
from matcher.evaluate.synthetic import sensor_set, synthetic_set, unrelated_set, zoomed_set
from matcher.images import DATA_VARIABLE, data_folder, find_images

# Sets made of photos, and how many pairs they have unless told.
_MADE = {
    "synthetic": (synthetic_set, 400),
    "zoom": (zoomed_set, 100),
    "sensors": (sensor_set, 100),
    "unrelated": (unrelated_set, 200),
}
_BENCH = (
    "oxford_graf",
    "opencv_pairs",
    "iguazu",
    "multimodal",
    "middlebury2003",
    "kitti_mini",
    "sceaux_castle",
)
_MULTIVIEW = ("kitchen", "bookstore")  # a recorded and a rendered scene; "multiview" is both
_DRAWN = "kitchen_angles"  # other pairs of the kitchen than the listed ones
NAMES = (*_MADE, *_BENCH, "bench", *_MULTIVIEW, "multiview", _DRAWN)


@dataclass(frozen=True)
class SetOptions:
    """Options of the sets."""

    # At most so many; None: 400 synthetic, 100 zoom, 100 sensors, 200 unrelated, 240 kitchen_angles, all of
    # others.
    pairs: int | None = None
    levels: tuple[int, ...] = (1, 2, 3, 4)  # of synthetic pairs
    seed: int = 0  # of synthetic, zoom, sensors, unrelated and kitchen_angles pairs
    images: Path | None = None  # folder of the images that a list of pairs names


def find_sets(where: str, options: SetOptions) -> list[PairSet]:
    """The sets of a name in `NAMES`, a folder of a known layout, a folder of photos, or a list of pairs.

    Raises:
        UsageError: an unknown name, an absent or empty path, a folder of no known layout, or damaged files.
        ImageError: a depth map that cannot be read.
    """
    path = Path(where)
    if where in NAMES:
        found = _named(where, options)
    elif not path.exists():
        raise UsageError(
            f"{where}: no such set, folder or list of pairs; the sets are {', '.join(NAMES)}, "
            f"in the folder named by {DATA_VARIABLE}"
        )
    elif path.is_dir():
        found = _of_folder(path, options)
    elif not path.is_file():
        raise UsageError(f"{path}: a pipe or device; name a folder or a list of pairs")
    elif not folders.is_pair_list(path):
        raise UsageError(
            f"{path}: not a list of pairs (a line for each: name0 name1 [rot0 rot1] K0 K1 cam1_from_cam0)"
        )
    else:
        found = [folders.read_pair_list(path, options.images)]
    for pair_set in found:
        if not len(pair_set):
            raise UsageError(f"{pair_set.name}: its folder has the right layout but no pairs")
    return found if options.pairs is None else [pair_set.first(options.pairs) for pair_set in found]


def _named(name: str, options: SetOptions) -> list[PairSet]:
    rooms, found = Path("multiview") / "val", []
    below = {
        "kitchen": rooms / "kitchen",
        _DRAWN: rooms / "kitchen",
        "bookstore": rooms / "bookstore_rendered",
    }
    for each in {"bench": _BENCH, "multiview": _MULTIVIEW}.get(name, (name,)):
        where = Path("photos") / "val" if each in _MADE else below.get(each, Path("bench") / each)
        folder = data_folder() / where
        if not folder.is_dir():
            raise UsageError(
                f"the set {each!r} is absent ({folder}); the benchmark folders are not part of the package: "
                f"set {DATA_VARIABLE} to the folder that holds photos/, bench/ and multiview/ (its layout: "
                "scripts/README.md, Repeating the measurements), or give a folder of your own"
            )
        if each in _MADE:
            found.append(_made(each, find_images(folder), options))
        elif each == _DRAWN:
            found.append(multiview.draw_recorded(folder, options.pairs or 240, options.seed))
        else:
            found += _of_folder(folder, options)
    return found


def _made(name: str, photos: list[Path], options: SetOptions) -> PairSet:
    make, count = _MADE[name]
    levels = {"levels": options.levels} if name == "synthetic" else {}
    return make(photos, count=count if options.pairs is None else options.pairs, seed=options.seed, **levels)


def _of_folder(folder: Path, options: SetOptions) -> list[PairSet]:
    """The sets of all layouts that a folder has; of none, warps of its photos."""
    images = options.images
    hpatches = [f for f in (folder, folder / "hpatches-sequences-release") if any(f.glob("*/H_1_2"))][:1]
    lists = [path for path in sorted(folder.glob("*.txt")) if folders.is_pair_list(path)]
    found = [folders.read_hpatches(root) for root in hpatches]
    if folders.scene_files(folder):
        found.append(folders.read_scene_files(folder, images))
    found += [folders.read_pair_list(path, images) for path in lists]
    for reader, fits in (
        (folders.read_affine, [*folder.glob("H1to2p"), *folder.glob("*/H1to2p")]),
        (folders.read_opencv_homography, (folder / "H1to3p.xml").is_file()),
        (folders.read_opencv_stereo, (folder / "aloeGT.png").is_file()),
        (folders.read_middlebury, [*folder.glob("*/disp2.pgm")]),
    ):
        found += [reader(folder)] if fits else []
    if multiview.is_rendered(folder):
        found += multiview.read_rendered(folder)
    elif (folder / "cameras.json").is_file():
        found += multiview.read_recorded(folder)
    for reader, fits in (
        (folders.read_wxbs, folders.is_wxbs(folder)),
        (
            folders.read_multimodal,
            (folder / "pairs.json").is_file() and not (folder / "cameras.json").exists(),
        ),
        (folders.read_kitti, [*folder.glob("poses.txt"), *folder.glob("*/poses.txt")]),
        (folders.read_posed, (folder / "poses.json").is_file()),
    ):
        found += [reader(folder)] if fits else []
    if found:
        return found
    if not any(folder.iterdir()):
        raise UsageError(f"{folder} is empty")
    try:
        photos = find_images(folder)
    except UsageError as error:
        raise UsageError(
            f"{folder}: no known layout (HPatches, MegaDepth-1500, ScanNet-1500, WxBS, lists of pairs, views "
            "with cameras.json, H1toNp sequences, KITTI-like sequences, Middlebury stereo), and no photos to "
            "make synthetic pairs from"
        ) from error
    return [_made("synthetic", photos, options)]
