"""What a run's results depend on, and the comparison of a run on disk with the present settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from matcher.cameras import Camera
from matcher.collection.schema import common_camera, one_line, to_json
from matcher.collection.sources import FeatureSource
from matcher.config import GRID_KIND, PipelineConfig, from_dict
from matcher.errors import IntegrityError, UsageError
from matcher.loading import build_pipeline, load
from matcher.pipeline import Pipeline
from matcher.presets import DEFAULT_PRESET, PRESETS, configure, option_at, refuse_further_passes
from matcher.tiling import by_tiles
from matcher.weights.files import locate_front_end, read_bytes


@dataclass(frozen=True)
class Setup:
    """What a worker builds its pipeline from."""

    source: FeatureSource
    preset: str = DEFAULT_PRESET
    options: Mapping[str, Any] = field(default_factory=dict)  # of `matcher.load`
    camera: Camera | None = None  # of every image that has none of its own
    shard: tuple[int, int] | None = None  # (i, n), i from 1: part i of n
    config: PipelineConfig | None = None  # every setting of a run that exists; None: those of the preset
    tiles: int | None = None  # keypoints of an image, by tiles at full resolution; None: whole images


def build(setup: Setup) -> Pipeline:
    """The pipeline of a collection; `UsageError`: options that do not fit, or a preset that finds keypoints
    pair by pair; `IntegrityError`: weights that are absent or damaged."""
    preset, options, tiles = setup.preset, setup.options, setup.tiles
    if setup.config is not None:
        pipeline = build_pipeline(preset, configure(setup.config, options), options)
        return pipeline if tiles is None else by_tiles(pipeline, tiles)
    if not setup.source.uses_front_end:
        of_front_ends = ("max_keypoints", "keep", "frontend", "variant", "frontend_weights", "max_pixels")
        useless = [name for name in of_front_ends if options.get(name) is not None]
        useless += [f"{name}=False" for name in ("upright", "alpha_mask") if options.get(name) is False]
        useless += ["tiles"] if tiles is not None else []
        if useless:
            raise UsageError(f"{useless[0]} has no effect on the features of a file; leave it out")
    if tiles is not None and "resize" in options:
        raise UsageError("keypoints by tiles are found at the images' own size; leave resize out, or tiles")
    shared = "for every pair, but the pairs of a collection must share the keypoints of an image"
    if preset in PRESETS and PRESETS[preset].extractor.kind == GRID_KIND:
        others = ", ".join(name for name, config in PRESETS.items() if config.extractor.kind != GRID_KIND)
        raise UsageError(f"{preset} finds new keypoints {shared}; use one of {others}")
    refuse_further_passes(options, f"further passes find new keypoints {shared}")
    if options.get("geometry") == "homographies":
        raise UsageError("a run stores one model for each pair: use geometry 'homography', or match_set")
    own = {"further_passes": False} if preset in PRESETS else {}
    pipeline = load(preset, **{**options, **own})
    return pipeline if tiles is None else by_tiles(pipeline, tiles)


def stored_setup(settings: Mapping[str, Any], source: FeatureSource, options: Mapping[str, Any]) -> Setup:
    """The setup of a run that exists; `refuse_changes` compares what comes of it."""
    given = {name: settings.get(name, True) for name in ("upright", "alpha_mask")} | dict(options)
    preset, camera, values = settings.get("preset"), common_camera(settings), settings.get("config", {})
    tiles, config = values.get("extractor", {}).get("tiles"), None
    if preset in PRESETS:  # another package's knows its own configuration
        try:
            config = from_dict(PipelineConfig, values)
        except ValueError as error:
            remedy = "match again into another folder, or by `matcher collection PHOTOS --run RUN --restart`"
            raise IntegrityError(f"another version made the run ({error}): {remedy}") from error
    return Setup(source, preset, given, camera, config=config, tiles=tiles)


def stored_pipeline(settings: dict[str, Any], source: FeatureSource, options: dict[str, Any]) -> Pipeline:
    """The pipeline that finds and matches features like those of a run that exists; `UsageError`: other
    weights than the run's, or another option."""
    allowed = {"weights", "frontend_weights", "device", "precision"}
    given = {name: value for name, value in options.items() if value is not None}
    if other := sorted(given.keys() - allowed):
        raise UsageError(f"{other[0]} is the run's own; only {', '.join(sorted(allowed))} can be given")
    setup = stored_setup(settings, source, given)
    pipeline = build(setup)
    found = describe(setup, pipeline)
    for name in ("weights", "frontend_weights"):
        if (own := settings.get(name)) != found[name]:
            here = f"({_short(own)}) than those here ({_short(found[name])})"
            raise UsageError(f"the run was made with other {name} {here}: give {name}=FILE")
    return pipeline


def describe(setup: Setup, pipeline: Pipeline) -> dict[str, Any]:
    """What the results of a run depend on, ready for JSON; where and on how many workers is no part of it."""
    config = {name: value for name, value in asdict(pipeline.config).items() if name != "further_passes"}
    extractor, front_end = pipeline.config.extractor, None
    source, photos = setup.source, setup.source.uses_front_end
    learned = photos and extractor.kind != "sift"
    if learned and extractor.kind != "learned":
        from matcher.extract.extractor import find_front_end

        learned = find_front_end(extractor.kind).build is not None
    if learned:
        given = setup.options.get("frontend_weights")
        path = locate_front_end(extractor) if given is None else Path(given)
        front_end = hashlib.sha256(read_bytes(path, "check the path")).hexdigest()
    found = {
        "preset": setup.preset,
        "weights": None if pipeline.weights is None else pipeline.weights.sha256,
        "frontend_weights": front_end,
        "precision": getattr(pipeline.matcher, "precision", "float32"),
        "config": config,
        "upright": pipeline.upright,
        "alpha_mask": pipeline.alpha_mask,
        "source": {"kind": "photos", "masks": source.masks is not None} if photos else {"kind": "hloc"},
        "camera": None if setup.camera is None else asdict(setup.camera),
        "shard": None if setup.shard is None else "{}/{}".format(*setup.shard),
        **({} if pipeline.package is None else {"package": pipeline.package}),
    }
    return json.loads(to_json(found))  # as a store will give it back: tuples are lists


def feature_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the features of a run depend on besides the images; where it is the same, a map can be used with
    the run."""
    own = ("preset", "package") if settings.get("preset") not in PRESETS else ()
    names = ("frontend_weights", "upright", "alpha_mask", "source", *own)
    found = {name: settings[name] for name in names if name in settings}
    return {**found, "config": {"extractor": settings.get("config", {}).get("extractor")}}


def differences(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], places: tuple[str, str] = ("in the run", "now")
) -> list[str]:
    """The settings that differ, as text with the places where they are."""

    def compared(old: Any, new: Any, name: str) -> Iterator[str]:
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            for key in sorted({*old, *new}):
                yield from compared(old.get(key), new.get(key), f"{name}.{key}" if name else key)
        elif old != new and not name.startswith(unused):
            option = option_at(name.removeprefix("config."))
            option = option.replace("extractor.soft_resize", "resize of soft images, None if one is given")
            yield f"{option}: {_short(old)} {places[0]}, {_short(new)} {places[1]}"

    calibration = "config.matcher.policy.calibration"
    unused = (f"{calibration}.refined", f"{calibration}.verified")  # a run has the probabilities before these
    return list(compared(stored, wanted, ""))


def _short(value: object) -> str:
    text = one_line(str(value))
    return text if len(text) <= 40 else f"{text[:12]}…"


def refuse_changes(run_dir: Path, stored: dict[str, Any], wanted: dict[str, Any], remedy: str) -> None:
    """Refuse to mix results of different settings, which the message names, in one run (`UsageError`)."""
    if not (found := differences(stored, wanted)):
        return
    if stored.get("preset") != wanted.get("preset"):
        reason = f"with the preset {stored.get('preset')}, not {wanted.get('preset')}"
    else:
        more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
        reason = f"with other settings: {'; '.join(found[:4])}{more}"
    raise UsageError(f"{run_dir} was made {reason}. {remedy}")


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """`i/n`, i from 1 to n; `UsageError`: anything else."""
    if text is None:
        return None
    left, _, right = text.partition("/")
    if left.isdecimal() and right.isdecimal() and 1 <= int(left) <= int(right):
        return int(left), int(right)
    raise UsageError(f"shard must be i/n with i from 1 to n, such as 3/16, not {text!r}")
