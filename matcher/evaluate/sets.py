"""Find the pair sets of a name, a folder or a list of pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from matcher.errors import UsageError
from matcher.evaluate import folders, multiview
from matcher.evaluate.protocols import PairSet
from matcher.evaluate.synthetic import sensor_set, synthetic_set, unrelated_set, zoomed_set
from matcher.images import DATA_VARIABLE, data_folder, find_images

_PHOTOS = Path("photos") / "val"
_BENCH = (
    "oxford_graf",
    "opencv_pairs",
    "iguazu",
    "multimodal",
    "middlebury2003",
    "kitti_mini",
    "sceaux_castle",
)
# A recorded and a rendered scene; "multiview" is both.
_MULTIVIEW = {
    "kitchen": Path("multiview") / "val" / "kitchen",
    "bookstore": Path("multiview") / "val" / "bookstore_rendered",
}
_DRAWN = "kitchen_angles"  # other pairs of the kitchen than the listed ones
NAMES = ("synthetic", "zoom", "sensors", "unrelated", *_BENCH, "bench", *_MULTIVIEW, "multiview", _DRAWN)


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
    if where in NAMES:
        return list(_limited(_named(where, options), options))
    path = Path(where)
    if not path.exists():
        raise UsageError(
            f"{where}: no such set, folder or list of pairs; the sets are {', '.join(NAMES)}, "
            f"in the folder named by {DATA_VARIABLE}"
        )
    if path.is_file():
        if not folders.is_pair_list(path):
            raise UsageError(
                f"{path}: not a list of pairs (a line for each: name0 name1 [rot0 rot1] K0 K1 cam1_from_cam0)"
            )
        return list(_limited([folders.read_pair_list(path, options.images)], options))
    if not path.is_dir():
        raise UsageError(f"{path}: a pipe or device; name a folder or a list of pairs")
    return list(_limited(_of_folder(path, options), options))


def _named(name: str, options: SetOptions) -> list[PairSet]:
    root = data_folder()
    names = {"bench": _BENCH, "multiview": tuple(_MULTIVIEW)}.get(name, (name,))
    found = []
    for each in names:
        below = _PHOTOS if each in _MADE else Path("bench") / each
        folder = root / _MULTIVIEW.get("kitchen" if each == _DRAWN else each, below)
        if not folder.is_dir():
            raise UsageError(
                f"the set {each!r} is absent ({folder}); the benchmark folders are not part of the package: "
                f"set {DATA_VARIABLE} to the folder that holds photos/, bench/ and multiview/ (its layout: "
                "scripts/README.md, Repeating the measurements), or give a folder of your own"
            )
        if each in _MADE:
            found.append(_made_of_photos(each, find_images(folder), options))
        elif each == _DRAWN:
            found.append(multiview.draw_recorded(folder, options.pairs or 240, options.seed))
        else:
            found += _of_folder(folder, options)
    return found


def _of_folder(folder: Path, options: SetOptions) -> list[PairSet]:
    readers = [reader for fits, reader in _layouts(options) if fits(folder)]
    if readers:
        return [pair_set for reader in readers for pair_set in reader(folder)]
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
    return [_made_of_photos("synthetic", photos, options)]


def _limited(found: list[PairSet], options: SetOptions) -> Iterator[PairSet]:
    for pair_set in found:
        if not len(pair_set):
            raise UsageError(f"{pair_set.name}: its folder has the right layout but no pairs")
        yield pair_set if options.pairs is None else pair_set.first(options.pairs)


def _made_of_photos(name: str, photos: list[Path], options: SetOptions) -> PairSet:
    make, count = _MADE[name]
    levels = {"levels": options.levels} if name == "synthetic" else {}
    return make(photos, count=count if options.pairs is None else options.pairs, seed=options.seed, **levels)


# Sets made of photos, and how many pairs they have unless told.
_MADE = {
    "synthetic": (synthetic_set, 400),
    "zoom": (zoomed_set, 100),
    "sensors": (sensor_set, 100),
    "unrelated": (unrelated_set, 200),
}


def _hpatches_root(folder: Path) -> Path | None:
    for root in (folder, folder / "hpatches-sequences-release"):
        if any(root.glob("*/H_1_2")):
            return root
    return None


def _landmarks(folder: Path) -> bool:
    return (folder / "pairs.json").is_file() and not (folder / "cameras.json").exists()


def _lists(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.txt")) if folders.is_pair_list(path)]


_Fits = Callable[[Path], object]
_Reader = Callable[[Path], list[PairSet]]


def _layouts(options: SetOptions) -> list[tuple[_Fits, _Reader]]:
    """Tests of a folder's layout, each with the reader of that layout."""
    images = options.images
    return [
        (_hpatches_root, lambda f: [folders.read_hpatches(_hpatches_root(f))]),
        (folders.scene_files, lambda f: [folders.read_scene_files(f, images)]),
        (_lists, lambda f: [folders.read_pair_list(path, images) for path in _lists(f)]),
        (lambda f: [*f.glob("H1to2p"), *f.glob("*/H1to2p")], lambda f: [folders.read_affine(f)]),
        (lambda f: (f / "H1to3p.xml").is_file(), lambda f: [folders.read_opencv_homography(f)]),
        (lambda f: (f / "aloeGT.png").is_file(), lambda f: [folders.read_opencv_stereo(f)]),
        (lambda f: [*f.glob("*/disp2.pgm")], lambda f: [folders.read_middlebury(f)]),
        (multiview.is_recorded, multiview.read_recorded),
        (multiview.is_rendered, multiview.read_rendered),
        (folders.is_wxbs, lambda f: [folders.read_wxbs(f)]),
        (_landmarks, lambda f: [folders.read_multimodal(f)]),
        (lambda f: [*f.glob("poses.txt"), *f.glob("*/poses.txt")], lambda f: [folders.read_kitti(f)]),
        (lambda f: (f / "poses.json").is_file(), lambda f: [folders.read_posed(f)]),
    ]
