"""Measurements that `matcher evaluate`, `matcher track --ground-truth` and `benchmark.py` do not make.

    python scripts/measure.py parts kitchen bookstore --pairs 12      # a preset without each further pass
    python scripts/measure.py verdicts ../shared --unrelated 3000     # on pairs of different places
    python scripts/measure.py reconstruction PHOTOS --work NEW_DIR    # beside COLMAP's own SIFT
    python scripts/measure.py budget --budget-ms 1000 --pairs 60      # poses of the kitchen within a time
    python scripts/measure.py roads                                   # drift of odometry on rendered roads

Sets are those of `matcher evaluate`; data are in the folder that MATCHER_DATA names (default ../shared).
"""

import argparse
import json
import math
import sys
from dataclasses import replace
from itertools import combinations, groupby
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import torch

import matcher
from matcher.errors import MatcherError, UsageError
from matcher.evaluate.folders import sequences
from matcher.evaluate.sets import SetOptions, find_sets
from matcher.images import find_images
from matcher.presets import DEFAULT_PRESET, find_preset
from matcher.sequence.trajectory import align, segment_errors


def parts(given: argparse.Namespace) -> None:
    """Accuracy and time of a preset, and of the same with each further pass switched off."""
    from matcher.evaluate.methods import Method
    from matcher.evaluate.run import as_markdown, as_object, evaluate
    from matcher.loading import build_pipeline

    config = find_preset(given.preset)
    if config.further_passes is None:
        raise UsageError(f"{given.preset} has no further passes to be switched off")
    passes = config.further_passes.passes
    variants = {"all parts": config, "without further passes": replace(config, further_passes=None)}
    for name in passes:
        fewer = replace(config.further_passes, passes=tuple(each for each in passes if each != name))
        variants[f"without {name}"] = replace(config, further_passes=fewer)
    methods = [Method(name, build_pipeline(given.preset, each, {})) for name, each in variants.items()]
    for pair_set in chosen(given):
        print(as_markdown(as_object(evaluate(pair_set, methods), baseline="all parts")), flush=True)


def apart(folder: Path, metres: float) -> list[tuple[Path, Path]]:
    """Pairs of left frames of a sequence whose cameras are so many metres apart, or more."""
    return [
        (frames[a], frames[b])
        for _, frames, poses in sequences(folder)
        for a, b in combinations(range(len(frames)), 2)
        if np.linalg.norm(poses[a][:, 3] - poses[b][:, 3]) >= metres
    ]


def verdicts(given: argparse.Namespace) -> None:
    """How often pairs of different places are called the same."""
    from matcher.evaluate.methods import Method
    from matcher.evaluate.protocols import PairImage, PairSet, UnrelatedPair
    from matcher.evaluate.run import evaluate, verdict_counts
    from matcher.verify.verdict import SAME

    methods = [Method(given.preset, matcher.load(given.preset))]
    print("| pairs | number | called same | unsure | called different | error rate below (95 %) |")
    print("|---|---|---|---|---|---|")
    for name, drawn in different_places(given.data, given.unrelated, given.lookalikes, given.seed).items():
        pairs = [UnrelatedPair(f"{a.name} {b.name}", "", PairImage(a), PairImage(b)) for a, b in drawn]
        records = evaluate(PairSet(name, "unrelated", pairs), methods).records[given.preset]
        counts = list(verdict_counts(records).values())
        bound = upper_bound(counts[0], sum(counts))
        print(f"| {name} | {sum(counts)} | {' | '.join(map(str, counts))} | {bound:.4f} |")
        for record in records:
            if record.verdict is not None and record.verdict >= SAME:
                print(f"wrong: {record.pair}", flush=True)


def different_places(
    data: Path, unrelated: int, lookalikes: int, seed: int
) -> dict[str, list[tuple[Path, Path]]]:
    """Pairs of different places on which the verdict was not fitted, by kind.

    Photos of a source with twenty or more in `photos/val` are lookalikes, such as façades of one city; so are
    frames of a street 40 m apart (`bench/kitti_mini`) and views of different scenes (`multiview/*/SCENE`).
    """
    rng, street = np.random.default_rng(seed), data / "bench" / "kitti_mini"
    sources = [list(group) for _, group in groupby(find_images(data / "photos" / "val"), lambda p: p.parent)]
    every = [path for group in sources for path in group]
    alike = [pair for group in sources if len(group) >= 20 for pair in combinations(group, 2)]
    found = {
        "photos of different sources": [(a, b) for a, b in combinations(every, 2) if a.parent != b.parent],
        "photos of one source": alike,
        "frames of a street 40 m apart": apart(street, 40.0) if street.is_dir() else [],
    }
    for name, pairs in found.items():
        count = unrelated if pairs is not alike and not name.startswith("frames") else lookalikes
        found[name] = [pairs[i] for i in rng.permutation(len(pairs))[:count]]
    folders = [folder for folder in sorted(data.glob("multiview/*/*")) if folder.is_dir()]
    scenes = [
        [p for p in find_images(folder) if not p.stem.endswith("_depth") and p.parent.name != "depth"]
        for folder in folders
    ]
    drawn = [rng.choice(len(scenes), 2, replace=False) for _ in range(lookalikes)]
    found["different scenes"] = [
        tuple(scenes[i][rng.integers(len(scenes[i]))] for i in places) for places in drawn
    ]
    return {name: pairs for name, pairs in found.items() if pairs}


def upper_bound(wrong: int, total: int) -> float:
    """The share of errors that is not exceeded with a confidence of 95 % (Wilson's score interval)."""
    share, z = wrong / total, 1.645  # one-sided 95 %
    spread = z * math.sqrt((share * (1 - share) + z * z / total / 4) / total)
    return (share + z * z / total / 2 + spread) / (1 + z * z / total)


def reconstruction(given: argparse.Namespace) -> None:
    """The largest models of photos from our matches and from COLMAP's own SIFT, by the same mapper.

    With `poses.json` beside the folder of photos (a list of `image` and centre `C`) also the worst centre.
    """
    import pycolmap

    from matcher.collection.collection import Collection
    from matcher.sfm.reconstruct import reconstruct

    given.work.mkdir(parents=True)
    start = perf_counter(), process_time()
    collection = Collection.open(
        given.work / "run", preset=given.preset, max_keypoints=given.max_keypoints, workers=0
    )
    collection.add_images(given.photos)
    collection.add_pairs(exhaustive=True)
    collection.run()
    with collection.store as store:
        reconstruct(store, given.work / "model", threads=1)
    ours = pycolmap.Reconstruction(given.work / "model" / "sparse" / "0")
    middle = perf_counter(), process_time()
    database, sift = given.work / "sift.db", pycolmap.FeatureExtractionOptions()
    sift.sift.max_num_features = given.max_keypoints
    pycolmap.logging.minloglevel = pycolmap.logging.ERROR.value
    pycolmap.set_random_seed(0)
    pycolmap.extract_features(database, given.photos, extraction_options=sift)
    pycolmap.match_exhaustive(database)
    mapping = pycolmap.IncrementalPipelineOptions(num_threads=1, random_seed=0, min_model_size=3)
    models = pycolmap.incremental_mapping(database, given.photos, given.work, mapping).values()
    theirs = max(models, key=lambda model: model.num_reg_images(), default=pycolmap.Reconstruction())
    end = perf_counter(), process_time()
    for name, model, times in (
        (given.preset, ours, np.subtract(middle, start)),
        ("COLMAP's SIFT", theirs, np.subtract(end, middle)),
    ):
        said = f"{model.num_reg_images()} images, {model.num_points3D()} points, tracks of "
        said += f"{model.compute_mean_track_length():.2f}, {model.compute_mean_reprojection_error():.3f} px"
        said += "; {:.0f} s, {:.0f} s of this process's CPU".format(*times)
        print(f"{name}: {said}{worst_centre(model, given.photos.parent / 'poses.json')}")


def worst_centre(model: "pycolmap.Reconstruction", truth: Path) -> str:  # noqa: F821
    """The largest error of a camera's centre after alignment, of the largest distance between two."""
    if not truth.is_file():
        return ""
    known = {Path(row["image"]).name: np.array(row["C"]) for row in json.loads(truth.read_text())}
    found = {image.name: image.projection_center() for image in model.images.values() if image.has_pose}
    a, b = (np.array([side[name] for name in sorted(found.keys() & known)]) for side in (found, known))
    centred0, centred1 = a - a.mean(axis=0), b - b.mean(axis=0)  # Umeyama 1991
    u, d, vt = np.linalg.svd(centred1.T @ centred0)
    signs = np.array([1, 1, np.sign(np.linalg.det(u @ vt))])
    moved = (d * signs).sum() / np.square(centred0).sum() * centred0 @ (u @ np.diag(signs) @ vt).T
    extent = np.linalg.norm(b[:, None] - b[None], axis=2).max()
    return (
        f", worst centre {100 * np.linalg.norm(moved - centred1, axis=1).max() / extent:.2f} % of the extent"
    )


def budget(given: argparse.Namespace) -> None:
    """Accuracy of the kitchen's poses within a time, and how well the time is kept."""
    from matcher.evaluate.measure import pose_error
    from matcher.evaluate.run import auc

    pipeline, errors, times = matcher.load(given.preset, geometry="essential"), [], []
    pairs = find_sets("kitchen", SetOptions(pairs=given.pairs))[0].pairs
    for pair in (pairs[0], *pairs):  # the first measures what the machine needs
        start = perf_counter()
        files, cameras = (pair.image0.path, pair.image1.path), {"camera0": pair.K0, "camera1": pair.K1}
        result = pipeline.match(*files, **cameras, budget_ms=given.budget_ms)
        times.append(1000 * (perf_counter() - start))
        errors.append(max(pose_error(result.geometry.cam1_from_cam0, pair.cam1_from_cam0)))
    areas = "/".join(f"{auc(np.array(errors[1:]), degrees):.3f}" for degrees in (5, 10, 20))
    middle, most = np.percentile(times[1:], (50, 95))
    kept = np.mean(np.array(times[1:]) <= given.budget_ms)
    print(f"pose AUC@5/10/20 {areas}; {middle:.0f} ms, 95 % within {most:.0f}, {kept:.0%} kept")


def chosen(given: argparse.Namespace) -> list:
    """The sets named, with at most so many pairs each."""
    return [one for name in given.sets for one in find_sets(name, SetOptions(pairs=given.pairs))]


def roads(given: argparse.Namespace) -> None:
    """How far odometry drifts on rendered roads, with two cameras and with one."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from street_scene import BASELINE, CAMERA, ROADS

    pipeline = matcher.load(given.preset, max_keypoints=given.max_keypoints, match_threshold=0.2)
    for name, road in ROADS.items():
        for stereo in (True, False):
            tracker = matcher.Tracker(pipeline, CAMERA, baseline=BASELINE if stereo else None)
            pairs = (road.pair(frame) for frame in range(30))
            results = [tracker.push_stereo(*each) if stereo else tracker.push(each[0]) for each in pairs]
            truth = np.array([road.pose(result.index) for result in results])
            print(f"{name}, {'two cameras' if stereo else 'one camera'}: {drift(results, truth, stereo)}")


def drift(results: list[matcher.FrameResult], truth: np.ndarray, stereo: bool) -> str:
    """Drift over 10, 20 and 40 m, and the largest error of steps that are sure and that are uncertain."""
    measured = np.array([result.is_measured for result in results])
    known, truth = [result for result in results if result.is_measured], truth[measured]
    found = align(truth, np.array([result.world_from_cam for result in known]), with_scale=not stereo)
    steps = [(np.linalg.inv(poses[:-1]) @ poses[1:])[:, :3, 3] for poses in (found, truth)]
    errors = 100 * np.linalg.norm(steps[0] - steps[1], axis=1) / np.linalg.norm(steps[1], axis=1)
    doubtful = np.array([result.pose_status == "uncertain" for result in known[1:]])
    drifts = "/".join(f"{100 * each.translation:.2f}" for each in segment_errors(truth, found, (10, 20, 40)))
    sure, unsure = (
        f"{chosen.sum()} steps at most {errors[chosen].max(initial=0):.1f} % off"
        for chosen in (~doubtful, doubtful)
    )
    return f"{drifts} %, {sure}, uncertain {unsure}, {(~measured).sum()} frames without a pose"


def main() -> int:
    """Make one measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    works = (parts, verdicts, reconstruction, budget, roads)
    made = {work.__name__: kinds.add_parser(work.__name__, help=work.__doc__) for work in works}
    for name, one in made.items():
        one.set_defaults(measure=globals()[name])
        one.add_argument("--preset", default=DEFAULT_PRESET)
        one.add_argument("--threads", type=int, default=1)
    made["parts"].add_argument("sets", nargs="+", metavar="SET")
    for name in ("parts", "budget"):
        made[name].add_argument("--pairs", type=int, help="of each set, at most, evenly spread over it")
    made["reconstruction"].add_argument("--max-keypoints", type=int, default=2048)
    made["roads"].add_argument("--max-keypoints", type=int, default=1024)
    made["verdicts"].add_argument("data", type=Path, help="folder with photos/val and multiview")
    made["verdicts"].add_argument("--unrelated", type=int, default=3000, help="pairs of different sources")
    made["verdicts"].add_argument("--lookalikes", type=int, default=300, help="pairs of each other kind")
    made["verdicts"].add_argument("--seed", type=int, default=0)
    made["reconstruction"].add_argument("photos", type=Path)
    made["reconstruction"].add_argument("--work", type=Path, required=True, help="for the run and the models")
    made["budget"].add_argument("--budget-ms", type=float, default=1000.0)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    try:
        given.measure(given)
    except MatcherError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
