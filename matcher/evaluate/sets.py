"""The pair sets of a name, a folder or a list of pairs: one table of names and one of layouts of folders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from matcher.errors import MALFORMED, MatcherError, UsageError
from matcher.evaluate import folders, synthetic
from matcher.evaluate.protocols import Pair, PairSet, PairsOnAccess, ProtocolName
from matcher.images import DATA_VARIABLE, data_folder, find_images

# Sets made of photos: protocol, pairs unless told, what makes one of (photos, number, seed), and a note.
_MADE: dict[str, tuple[ProtocolName, int, Callable[..., Pair], str]] = {
    "synthetic": ("homography", 400, synthetic.warped_pair, "at most 640 pixels, and warped views of them"),
    "zoom": ("homography", 100, synthetic.zoomed_pair, "and parts of them of 2.5 to 6 times the resolution"),
    "sensors": ("homography", 100, synthetic.sensor_pair, "recoloured at random as if by two sensors"),
    "hard": ("homography", 100, synthetic.hard_pair, "seen from the side in other weather"),
    "unrelated": ("unrelated", 200, synthetic.unrelated_pair, "of different folders if there are several"),
    "planes": ("trap", 120, synthetic.planes_pair, "pose known"),
    "repeats": ("trap", 120, synthetic.repeats_pair, "half of the pairs show another instance"),
    "overlays": ("trap", 160, synthetic.overlays_pair, "`still` pairs are the counter-example"),
    "facades": ("trap", 300, synthetic.facades_pair, "each pair once, with a photo of val"),
}
_BENCH = ("oxford_graf", "iguazu", "multimodal", "middlebury2003", "kitti_mini", "sceaux_castle")
_SEVERAL = {"bench": _BENCH, "multiview": ("kitchen", "bookstore")}
# Folders below $MATCHER_DATA.
_PLACES = {
    **{name: "photos/val" for name in _MADE},
    **{name: f"bench/{name}" for name in _BENCH},
    "facades": "photos",  # those of one city in train and val
    "kitchen": "multiview/val/kitchen",
    "bookstore": "multiview/val/bookstore_rendered",
    "kitchen_angles": "multiview/val/kitchen",  # other pairs than the listed ones
}


@dataclass(frozen=True)
class SetOptions:
    """Options of the sets."""

    pairs: int | None = None  # at most; None: as `_MADE` says, 240 kitchen_angles, all of others
    levels: tuple[int, ...] = (1, 2, 3, 4)  # of synthetic pairs
    seed: int = 0  # of sets made of photos, and of kitchen_angles
    images: Path | None = None  # folder of the images that a list of pairs names


class Layout(NamedTuple):
    """A layout of benchmark folders."""

    protocol: ProtocolName
    read: Callable[[Path], Iterable[Pair]]  # nothing from a folder of another layout with such a file
    files: tuple[str, ...]  # patterns, one of which a file of the folder has
    name: str = "{}"  # of the set, with the folder's
    note: str | Callable[[Path], str] = ""
    shorter_side: int | None = None  # as of `PairSet`


_LAYOUTS = (
    # Of the size in published results.
    Layout("homography", folders.hpatches, folders.HPATCHES, "{}", folders.hpatches_note, 480),
    Layout("homography", folders.affine, ("H1to2p", "*/H1to2p")),
    Layout("correspondences", folders.middlebury, ("*/disp2.pgm",)),
    Layout("depth", folders.rendered, ("cameras.json",), note="Depth and poses are exact"),
    Layout("homography", lambda folder: folders.rendered(folder, True), ("cameras.json",), "{}-light"),
    Layout("depth", folders.recorded, ("cameras.json",), note=folders.TRACKED),
    Layout("correspondences", folders.wxbs, folders.WXBS, note=folders.BY_HAND),
    Layout("homography", folders.multimodal, ("pairs.json",), note=folders.BY_LANDMARKS),
    Layout("pose", folders.kitti, ("poses.txt", "*/poses.txt")),
    Layout("pose", folders.posed, ("poses.json",), note=folders.BY_SFM),
)


def find_sets(where: str, options: SetOptions) -> list[PairSet]:
    """The sets of a name, a folder of a known layout, a folder of photos, or a list of pairs."""
    path = Path(where)
    if where in _PLACES or where in _SEVERAL:
        found = [each for name in _SEVERAL.get(where, (where,)) for each in _named(name, options)]
    elif not path.exists():
        raise UsageError(
            f"{where}: no such set, folder or list of pairs; the sets, in {DATA_VARIABLE}, are "
            f"{', '.join([*_PLACES, *_SEVERAL])}"
        )
    elif path.is_dir():
        found = _of_folder(path, options)
    elif not path.is_file():
        raise UsageError(f"{path}: a pipe or device; name a folder or a list of pairs")
    else:
        found = [folders.pair_list(path, options.images)]
    for pair_set in found:
        if not len(pair_set):
            raise UsageError(f"{pair_set.name}: its folder has the right layout but no pairs")
    return found if options.pairs is None else [pair_set.first(options.pairs) for pair_set in found]


def made_set(name: str, photos: Sequence[Path], options: SetOptions) -> PairSet:
    """A set of `_MADE`, whose pairs are each made when it is asked for."""
    protocol, usual, make, note = _MADE[name]
    count, photos = usual if options.pairs is None else options.pairs, tuple(photos)
    levels, seed = options.levels, options.seed
    if count < 1:
        raise UsageError(f"the number of pairs must be at least 1, not {count}")
    if not levels or not set(levels) <= synthetic.LEVELS.keys():
        known = ", ".join(map(str, synthetic.LEVELS))
        raise UsageError(f"levels must be among {known}, not {list(levels)}")
    if name in ("unrelated", "facades") and len(photos) < 2:
        raise UsageError(f"pairs of different photos need at least two, not {len(photos)}")
    if name == "synthetic":
        make = partial(make, levels=levels)
    pairs = PairsOnAccess(count, lambda number: make(photos, number, seed))
    return PairSet(name, protocol, pairs, note=f"{len(photos)} photos, {note}. Seed {seed}")


def _named(name: str, options: SetOptions) -> list[PairSet]:
    folder = data_folder() / _PLACES[name]
    if not folder.is_dir():
        raise UsageError(
            f"the set {name!r} is absent ({folder}); it is not part of the package: set {DATA_VARIABLE} to "
            "the folder that has it (its layout: docs/scripts.md, Data), or give a folder of your own"
        )
    if name == "kitchen_angles":
        drawn = folders.drawn(folder, 240 if options.pairs is None else options.pairs, options.seed)
        return [PairSet(name, "depth", drawn, note=folders.TRACKED)]
    if name not in _MADE:
        return _of_folder(folder, options)
    photos = [path for path in find_images(folder) if name != "facades" or path.parent.name == "facades_spb"]
    return [made_set(name, photos, options)]


def _of_folder(folder: Path, options: SetOptions) -> list[PairSet]:
    """The sets of all layouts that a folder has; of none, warps of its photos."""
    found = []
    for layout in _LAYOUTS:
        if any(any(folder.glob(pattern)) for pattern in layout.files):
            name = layout.name.format(folder.resolve().name)
            try:
                pairs = tuple(layout.read(folder))
            except MatcherError:
                raise
            except MALFORMED as error:  # what is absent or of another type, wherever it is needed
                fault = f"{type(error).__name__}: {error}"
                raise UsageError(
                    f"{folder}: {layout.files[0]} or a file beside it is damaged ({fault})"
                ) from error
            note = layout.note(folder) if callable(layout.note) else layout.note
            found.append(PairSet(name, layout.protocol, pairs, layout.shorter_side, note))
    found = [each for each in found if len(each)] or found
    if scenes := tuple(folders.megadepth(folder, options.images)):
        found.append(PairSet(folder.resolve().name, "pose", scenes))
    lists = [path for path in sorted(folder.glob("*.txt")) if folders.is_pair_list(path)]
    found += [folders.pair_list(path, options.images) for path in lists]
    if found:
        return found
    if not any(folder.iterdir()):
        raise UsageError(f"{folder} is empty")
    try:
        photos = find_images(folder)
    except UsageError as error:
        raise UsageError(
            f"{folder}: no known layout (see `matcher evaluate --help`), and no photos for synthetic pairs"
        ) from error
    return [made_set("synthetic", photos, options)]
