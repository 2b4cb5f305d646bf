"""More photos for a model that exists: matched in its run, registered, triangulated and adjusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from glob import escape
from itertools import combinations
from pathlib import Path
from typing import Any, Unpack

from matcher.cameras import read_rig_config
from matcher.collection.collection import Collection
from matcher.collection.pairs import BEST
from matcher.collection.sources import PairChoice, Photos, Selection, default_choice
from matcher.collection.store import Store, Writer, gone
from matcher.collection.workers import OnProgress, add_pairs
from matcher.errors import IntegrityError, UsageError, counted, few
from matcher.export.colmap import CameraChoice, read_exif
from matcher.files import check_folder
from matcher.images import find_images
from matcher.match.retrieval import similar_pairs
from matcher.sfm.models import find_run, read_given_poses, read_summary, whole_model
from matcher.sfm.reconstruct import RIG, MappingOptions, Reconstruction, reconstruct

# Pairs of a reconstruction where none are asked for, as arguments of `default_choice`. Of 20 photos of a
# street 74 of 190 pairs are matched so, in half the time, and the model is as exact; ten photos gain nothing.
PAIRS = {"exhaustive_up_to": 12, "neighbours": 30, "preemptive": True}

OnRound = Callable[[int, int], None]  # images without a pose, pairs that are matched now


def more_pairs(
    collection: Collection, *, on_round: OnRound = lambda *_: None, on_progress: OnProgress | None = None
) -> Callable[[frozenset[str]], bool]:
    """What matches more pairs of images without a pose, and says whether there were any; see `reconstruct`.
    First the pairs of each with the most similar others, then all in a run of up to 100 images, in a larger
    one those that the strongest keypoints were compared of; none where pairs were not chosen preemptively."""
    rounds = [True, False]  # whether with the most similar images

    def match_more(without_pose: frozenset[str]) -> bool:
        with collection.store as store:
            choice = store.pair_choice
            names = sorted({image.name for image in store.images() if image.status == "done"} - gone(store))
        if not isinstance(choice, PairChoice) or choice.method != "preemptive":
            return False
        while rounds:
            k = BEST if rounds.pop(0) else None if len(names) <= 100 else choice.neighbours
            with collection.store as store:
                pairs = combinations(names, 2) if k is None else list(similar_pairs(names, store.features, k))
            with Writer(collection.run_dir) as writer:
                new = add_pairs(writer, (pair for pair in pairs if without_pose & set(pair)))[1]
            if new:
                on_round(len(without_pose), new)
                collection.run(on_progress=on_progress)
                return True
        return False

    return match_more


def continue_model(
    model: str | Path,
    photos: str | Path,
    out: str | Path,
    *,
    run_dir: str | Path | None = None,
    choice: CameraChoice | None = None,
    pairs: dict[str, Any] | None = None,
    on_progress: OnProgress | None = None,
    on_round: OnRound = lambda *_: None,
    how: dict[str, Any] | None = None,
    selection: Selection = Selection(),
    **options: Unpack[MappingOptions],
) -> Reconstruction:
    """A model with more photos, in the same world coordinates; what is matched stays in the run.

    The model is a folder that `reconstruct` wrote, whose rig applies to all photos; these lie in the run's
    folder of images. `choice` has the cameras of new photos that share none with a photo of the model,
    `pairs` arguments of `Collection.add_pairs` (None: as those of the run were, or where these came from a
    list or names, all in small runs, else similar ones), `how` those of `Collection.reopen`, `selection` the
    photos to add, by names below `photos`; other images of the run stay out, but those that the model tried
    are tried again.
    """
    check_folder(Path(out), overwrite=options.get("overwrite", False))  # before hours of matching
    given = read_given_poses(model, fixed=False)
    run = find_run(model) if run_dir is None else Path(run_dir)
    if (rig := Path(model) / RIG).is_file():
        choice = replace(choice or CameraChoice(), rig=read_rig_config(rig))
    with Store.open(run) as store:
        selection = replace(selection, known=frozenset(store.names().values()))
        present = _names(photos, store.image_folder, selection)
        new = sorted(set(present).difference(given.cam_from_world))
        if not new:
            raise UsageError(f"the model has all {len(present)} photos of {photos} already")
        source, pictures = store.settings["source"], Photos(store.image_folder)
        # Digests of features, or of masked photos, are not those of the files.
        plain = source["kind"] == "photos" and not source.get("masks")
        for image in store.images() if plain else ():
            known = image.name in given.cam_from_world and image.status == "done" and image.path.is_file()
            if known and pictures.digest(image.name) != image.sha256:
                raise IntegrityError(
                    f"{image.path} has changed since its pose was found: put the old file back and give the "
                    "new one another name, or make the model again"
                )
        tried = read_summary(whole_model(Path(model))).get("unregistered")
        own = {*given.cam_from_world, *(map(str, tried if isinstance(tried, list) else ()))}
        there = {image.name for image in store.images() if image.name in own and image.path.is_file()}
        there, folder, chosen = there.union(new), store.image_folder, store.pair_choice
    names = sorted(there.union(given.cam_from_world))
    collection = Collection.reopen(run, **(how or {}))
    collection.add_images(folder, include=[escape(name) for name in sorted(there)])
    if chosen is None or chosen.by_default or chosen.from_list or chosen.method == "sequential":
        chosen = default_choice(len(names), **PAIRS)
    collection.add_pairs(**(pairs or {"pairs": chosen}), of=new, on_progress=on_progress)
    collection.run(on_progress=on_progress)
    more = more_pairs(collection, on_round=on_round, on_progress=on_progress)
    with Store.open(run) as store:
        keys = {}  # photos by the same device, of one size and focal length, share the model's camera
        for image in store.images():
            exif = read_exif(image.path)
            keys[image.name] = (image.size, exif if exif.model else str(Path(image.name).parent))
        known = {keys[name]: camera for name, camera in given.cameras.items() if name in keys}
        shared = {name: known[key] for name, key in keys.items() if key in known}
        poses = replace(given, cameras={**shared, **given.cameras})
        how = dict(choice=choice, only=names, poses=poses, on_incomplete=more)
        made = reconstruct(store, out, **how, **options)
    made.export.notes.append(f"without a pose before: {counted(len(new), 'photo')}: {few(new)}")
    return made


def _names(photos: str | Path, folder: Path, selection: Selection) -> list[str]:
    """Names in the run, whose images lie in a folder, of the photos below another one that are selected by
    their names there."""
    given = Path(photos)
    found = selection.apply(path.relative_to(given).as_posix() for path in find_images(given))
    if not (real := given.resolve()).is_relative_to(folder.resolve()):
        raise UsageError(
            f"{photos} does not lie in {folder}, the folder of the run's images: put it there, for example "
            f"as {folder / given.name}"
        )
    below = real.relative_to(folder.resolve())
    return sorted((below / name).as_posix() for name in found)
