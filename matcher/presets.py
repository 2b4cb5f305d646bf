"""Named configurations, and the options that adjust them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.metadata import EntryPoint, entry_points
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from matcher.config import (
    ALL_LAYERS,
    GRID_KIND,
    AssignmentConfig,
    BackboneConfig,
    CalibrationConfig,
    ContextConfig,
    Engine,
    ExtractorConfig,
    FurtherPassesConfig,
    GeometryKind,
    MatchingPolicy,
    NearestConfig,
    NetworkConfig,
    PipelineConfig,
    PositionConfig,
    Precision,
    RefineConfig,
    RefinedCalibrationConfig,
    RefinementConfig,
    VerifiedCalibrationConfig,
    from_dict,
)
from matcher.errors import UsageError, check_number, unknown_name
from matcher.files import read_toml

# Ours, one network: `hybrid` for SIFT keypoints, `hybrid-learned` for our front end's. Thresholds and shares
# were chosen for the shipped weights on training photos (weights/README.md), calibrations by scripts/fit.py.
_HYBRID = NetworkConfig(
    guided=True,
    assignment=AssignmentConfig(consensus=2),
    match_probability=True,
    policy=MatchingPolicy(
        match_threshold=0.03,
        threshold_doubles_at=20.0,
        exit_share=0.9,
        prune_matchability=0.02,
        prune_confident_only=False,
        min_pruned_share=0.05,
        calibration=CalibrationConfig(
            offset=2.99,
            slope=0.44,
            share_slope=1.3,
            verified=VerifiedCalibrationConfig(offset=-2.02, slope=0.58, inlier=2.26, share_slope=0.28),
        ),
    ),
)
_HYBRID_LEARNED = replace(
    _HYBRID,
    kind="learned",
    descriptor_dim=64,
    position=PositionConfig(inputs=("xy",)),
    context=ContextConfig(scale_logits_above=384),
    policy=replace(
        _HYBRID.policy,
        match_threshold=0.05,
        prune_matchability=0.01,
        calibration=CalibrationConfig(
            offset=0.8,
            slope=0.58,
            share_slope=0.49,
            refined=RefinedCalibrationConfig(
                offset=0.9, slope=0.85, refined=1.75, variance_slope=-0.31, further_passes=-1.56
            ),
            verified=VerifiedCalibrationConfig(offset=-2.0, slope=0.58, inlier=1.85, share_slope=0.43),
        ),
    ),
)
# SuperGlue, Sarlin et al. 2020: position and score by an MLP, one learned dustbin, a fixed depth.
_SUPERGLUE = NetworkConfig(
    kind="superpoint",
    descriptor_dim=256,
    project=False,
    position=PositionConfig(kind="mlp", inputs=("xy", "score"), extent=0.7),
    context=ContextConfig(dim=256, heads=4, depth=9, shared_qk=False, norm="batch", activation="relu"),
    assignment=AssignmentConfig(dustbin="learned", every_layer=False, tolerance=None),
    policy=MatchingPolicy(match_threshold=0.2, early_exit=False, pruning=False),
)
# LightGlue, Lindenberger et al. 2023: rotary positions, dual softmax with matchabilities, exit and pruning.
_LIGHTGLUE = NetworkConfig(
    kind="superpoint",
    descriptor_dim=256,
    project=False,
    position=PositionConfig(inputs=("xy",)),
    context=ContextConfig(dim=256, heads=4, depth=9),
    assignment=AssignmentConfig(kind="dual_softmax"),
)
_LIGHTGLUE_128 = replace(_LIGHTGLUE, kind="disk", descriptor_dim=128, project=True)
_SIGMA = PositionConfig(inputs=("xy", "raw_sigma", "raw_orientation"))
_SCALE = PositionConfig(inputs=("xy", "raw_scale", "raw_counterclockwise"))
_FRAME = PositionConfig(inputs=("xy", "frame"))
_LIGHTGLUE_SIFT = replace(_LIGHTGLUE_128, kind="sift", position=_SIGMA)
_LIGHTGLUE_DOGHARDNET = replace(_LIGHTGLUE_128, kind="doghardnet", position=_SCALE)
_LIGHTGLUE_KEYNET = replace(_LIGHTGLUE_128, kind="keynet", position=_FRAME, policy=ALL_LAYERS)
_LIGHTERGLUE = replace(
    _LIGHTGLUE,
    kind="xfeat",
    descriptor_dim=64,
    project=True,
    context=ContextConfig(dim=96, heads=1, depth=6),
    policy=MatchingPolicy(early_exit=False, prune_matchability=0.05, prune_confident_only=False),
)
# LoFTR, Sun et al. 2021: cells of a grid, linear attention, dual softmax, windows on a finer map.
_ON_GRID = {"every_layer": False, "project": False, "border": 2}
_LOFTR = NetworkConfig(
    kind="loftr",
    descriptor_dim=256,
    project=False,
    position=PositionConfig(kind="sine", frequencies="steep"),
    context=replace(RefinementConfig().context, dim=256, depth=4),
    assignment=AssignmentConfig(kind="dual_softmax", dustbin="none", temperature=0.1, **_ON_GRID),
    policy=MatchingPolicy(match_threshold=0.2, early_exit=False, pruning=False),
    backbone=BackboneConfig(),
    refinement=RefinementConfig(),
)
_LOFTR_NEW = replace(_LOFTR, position=PositionConfig(kind="sine"))
# The assignment of the networks that were published as "ot" beside those of dual softmax ("ds").
LOFTR_TRANSPORT = AssignmentConfig(
    dustbin="learned", max_iterations=3, tolerance=None, drop_unmatched=True, **_ON_GRID
)
_LEARNED = ExtractorConfig("learned", soft_resize=640, sparse_resize=1024)
_GRID = ExtractorConfig(GRID_KIND, resize=640)  # its points lie on no corner, and the network refines them


def _preset(network: NetworkConfig | NearestConfig, weights: str | None, **parts: Any) -> PipelineConfig:
    """A preset of a network on its own front end."""
    kind = network.kind if isinstance(network, NetworkConfig) else "sift"
    return PipelineConfig(network, weights=weights, **{"extractor": ExtractorConfig(kind), **parts})


PRESETS: dict[str, PipelineConfig] = {
    "hybrid": _preset(_HYBRID, "hybrid"),
    "hybrid-learned": _preset(
        _HYBRID_LEARNED, "hybrid-learned", extractor=_LEARNED, further_passes=FurtherPassesConfig()
    ),
    "nearest": _preset(NearestConfig(), None),
    "nearest-learned": _preset(NearestConfig(ratio=0.91), None, extractor=_LEARNED),
    "superglue-indoor": _preset(_SUPERGLUE, "superglue-indoor"),
    "superglue-outdoor": _preset(_SUPERGLUE, "superglue-outdoor"),
    "lightglue-superpoint": _preset(_LIGHTGLUE, "lightglue-superpoint"),
    "lightglue-disk": _preset(_LIGHTGLUE_128, "lightglue-disk"),
    "lightglue-aliked": _preset(replace(_LIGHTGLUE_128, kind="aliked"), "lightglue-aliked"),
    "lightglue-sift": _preset(_LIGHTGLUE_SIFT, "lightglue-sift"),
    "lightglue-doghardnet": _preset(_LIGHTGLUE_DOGHARDNET, "lightglue-doghardnet"),
    "lightglue-keynet": _preset(_LIGHTGLUE_KEYNET, "lightglue-keynet"),
    "lightglue-dedodeb": _preset(replace(_LIGHTGLUE, kind="dedodeb"), "lightglue-dedodeb"),
    "lightglue-dedodeg": _preset(replace(_LIGHTGLUE, kind="dedodeg"), "lightglue-dedodeg"),
    "lightglue-xfeat": _preset(_LIGHTERGLUE, "lightglue-xfeat"),
    "loftr-outdoor": _preset(_LOFTR, "loftr-outdoor", extractor=replace(_GRID, resize=840), refine=None),
    "loftr-indoor": _preset(_LOFTR, "loftr-indoor", extractor=_GRID, refine=None),
    "loftr-indoor-new": _preset(_LOFTR_NEW, "loftr-indoor-new", extractor=_GRID, refine=None),
}
DEFAULT_PRESET = "hybrid-learned"

# Seconds of one core (AVX2) for an image of 1024 x 768 pixels and 2048 keypoints, of the front ends that take
# more than two: to be told before the work.
SLOW_FRONT_ENDS = {"superpoint": 3, "aliked": 3, "disk": 8, "dedodeb": 50, "dedodeg": 50}  # at least


def find_preset(name: str) -> PipelineConfig:
    """The configuration of that name in `PRESETS`; `UsageError`: there is none, or another package's."""
    if name not in PRESETS:
        if plugin := find_plugin(name):
            raise UsageError(
                f"the preset {name!r} is built by a function of {package_of(plugin)} ({plugin.value}), which "
                "alone knows its values; name a preset of matcher's own"
            )
        raise UsageError(unknown_name("preset", name, PRESETS))
    return PRESETS[name]


def from_file(preset: str | Path, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A preset's name and the options given beside it; those of a FILE.toml, before which the others go.

    The file has a line for each option of `LoadOptions`, and `preset = "NAME"`, by default the default one.
    `UsageError`: it cannot be read, or has an unknown preset or option or a value that cannot be used.
    """
    given = {name: value for name, value in options.items() if value is not None}
    preset = str(preset) if isinstance(preset, PathLike) else preset
    if not isinstance(preset, str):
        raise UsageError(f"a preset is a name or a FILE.toml, not {preset!r}; leave it out for the default")
    if not preset.endswith(".toml"):
        return preset, given
    values = read_toml(preset)
    name = values.pop("preset", DEFAULT_PRESET)
    if not isinstance(name, str):
        raise UsageError(f"{preset}: preset must be a name, not {name!r}")
    if name.endswith(".toml"):
        raise UsageError(f"{preset}: preset must be the name of one, not another file ({name})")
    if name not in PRESETS and find_plugin(name) is None:
        raise UsageError(f"{preset}: {unknown_name('preset', name, [*PRESETS, *plugin_names()])}")
    try:
        values = given_options(values)
    except UsageError as error:
        raise UsageError(f"{preset}: {error}") from None
    return name, values | given


class LoadOptions(TypedDict, total=False):
    """What adjusts a preset; None always means the preset's own value. The command line's help says the same.

    Args:
        weights (FILE): Matcher weights: a file, or a name from `matcher weights list`.
        frontend (NAME): Use another front end than the preset's, for example disk; it must fit the matcher.
        frontend_weights (FILE): Weights file of the front end; needed only for front ends of your own.
        variant (NAME): Variant of the front end, for example aliked-n32.
        max_keypoints (N): Keep at most N keypoints per image.
        resize (PX): Shrink larger images until the longer side has PX pixels. Without it, the learned front
            end's presets shrink soft images further, to 640 at least, and enlarge small ones with few
            keypoints.
        keep: Which SIFT keypoints to keep if an image has more than are kept.
        geometry: Model that verifies the matches; homographies: of several planes; essential needs cameras.
        match_threshold (P): Keep matches whose probability, before calibration, is at least P, 0 to 1.
        ratio (R): Ratio test of the nearest* presets: keep matches whose distance ratio is at most R, 0 to 1.
        early_exit: Stop a pair at the layer where the network is confident.
        pruning: Drop keypoints that cannot match, layer by layer.
        further_passes: Where too few matches of the first pass agree, match other features, scales and the
            common region too.
        refine: Move every match to where the images look most alike; without it faster, less exact.
        upright: Apply the EXIF orientation of images; without it they are matched as stored.
        alpha_mask: Find no keypoints where a picture is transparent; without it alpha is ignored.
        bgr: Arrays of three or four channels are BGR, as OpenCV reads them; else RGB.
        max_pixels (N): Refuse images of more than N pixels before decoding them.
        engine: Library that runs front end and networks; onnx needs no torch.
        precision: Arithmetic of the networks; auto picks the fastest one that suits the device.
        device (auto|cpu|cuda|mps): Device to run on; auto prefers CUDA.

    One GPU of several is "cuda:1", and float16 also "half". By default the engine is the one that is
    installed, torch before ONNX Runtime, which runs on the CPU; `further_passes` are on for `hybrid-learned`
    alone, `refine` where there are keypoints, and `upright` and `alpha_mask`. Probabilities are calibrated
    with `early_exit`. A ratio is above 0; geometry may also be "none"; `max_pixels` is width · height.
    """

    weights: str | Path | None
    frontend: str | None
    frontend_weights: str | Path | None
    variant: str | None
    max_keypoints: int | None
    resize: int | None
    keep: Literal["strongest", "largest"] | None
    geometry: GeometryKind | None
    match_threshold: float | None
    ratio: float | None
    early_exit: bool | None
    pruning: bool | None
    further_passes: bool | None
    refine: bool | None
    upright: bool | None
    alpha_mask: bool | None
    bgr: bool | None
    max_pixels: int | None
    engine: Engine | None
    precision: Precision | None
    device: str | None


# Where an option lies in a configuration; the other options steer how a pipeline is built.
_FIELDS = {name: ("extractor", name) for name in ("variant", "max_keypoints", "resize", "keep")} | {
    "frontend": ("extractor", "kind"),
    "geometry": ("estimation", "kind"),
}
OF_NETWORKS = ("match_threshold", "early_exit", "pruning")  # how a network is used
_NETWORK = {name: ("matcher", "policy", name) for name in OF_NETWORKS}
_NEAREST = {name: ("matcher", name) for name in ("match_threshold", "ratio")}


def configure(config: PipelineConfig, options: Mapping[str, Any]) -> PipelineConfig:
    """The configuration with the options of `LoadOptions` applied; `UsageError`: an unknown option, a value
    of the wrong type or out of range, or an option that the configuration has no use for."""
    given, on_grid = given_options(options), config.extractor.kind == GRID_KIND
    if (on_grid or given.get("frontend") == GRID_KIND) and given.keys() & {"frontend", "variant"}:
        raise UsageError(f"cells of a grid ({GRID_KIND}) are no front end: leave frontend and variant out")
    values, fields, useless = asdict(config), _FIELDS, []
    if isinstance(config.matcher, NearestConfig):
        fields = _FIELDS | _NEAREST
        useless = [name for name in ("weights", "early_exit", "pruning") if name in given]
        learned = given.get("frontend", config.extractor.kind) == "learned"  # which computes in a precision
        if not learned and given.get("precision", "auto") not in ("auto", "float32"):
            useless.append("precision")
    elif isinstance(config.matcher, NetworkConfig):
        fields = _FIELDS | _NETWORK
        if "ratio" in given:
            raise UsageError("ratio is for the presets without a network, nearest*; use match_threshold here")
    else:
        useless = [name for name in ("weights", "ratio", *OF_NETWORKS) if name in given]
    if useless:
        raise UsageError(f"the matcher of this preset takes no {useless[0]}; leave it out")
    for name, (*tables, key) in fields.items():
        if name in given:
            table = values
            for step in tables:
                table = table[step]
            table[key] = given[name]
    sizes = values["extractor"]
    if sizes["kind"] != config.extractor.kind:
        sizes["sparse_resize"] = None  # only the preset's own front end is known to gain
    if "resize" in given:
        sizes["soft_resize"] = None
        if None not in (sizes["sparse_resize"], given["resize"]):
            sizes["sparse_resize"] = min(sizes["sparse_resize"], given["resize"])
    if "further_passes" in given:  # of a preset without any those of its own features alone
        if given["further_passes"] and on_grid:
            raise UsageError("further_passes needs keypoints; this preset has only the cells of a grid")
        passes = config.further_passes or FurtherPassesConfig(preset=None)
        values["further_passes"] = asdict(passes) if given["further_passes"] else None
    if "refine" in given:
        values["refine"] = asdict(config.refine or RefineConfig()) if given["refine"] else None
    try:
        matcher = from_dict(type(config.matcher), values.pop("matcher"), "matcher")
        return replace(from_dict(PipelineConfig, values), matcher=matcher)
    except ValueError as error:
        where, _, fault = str(error).removeprefix("PipelineConfig.").partition(": ")
        raise UsageError(f"{option_at(where)}: {fault}") from error


def option_at(path: str) -> str:
    """The option that sets a configuration's value of this dotted path; other paths as they are."""
    fields = [*_FIELDS.items(), *_NETWORK.items(), *_NEAREST.items()]
    return next((name for name, steps in fields if ".".join(steps) == path), path)


def refuse_further_passes(options: Mapping[str, Any], reason: str) -> None:
    """`UsageError` for `further_passes=True` where pairs are matched by one pass, for a reason."""
    if options.get("further_passes"):
        raise UsageError(f"{reason}; leave further_passes away")


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not None, in Python's own types, devices and precisions as torch names them;
    `UsageError`: an unknown option, or a value of the wrong type or out of range."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in options:
        if name not in LoadOptions.__annotations__:
            raise UsageError(unknown_name("option", name, LoadOptions.__annotations__))
    for name, value in given.items():
        if hasattr(value, "item") and getattr(value, "shape", None) == ():
            given[name] = value.item()
    for name in ("weights", "frontend_weights"):
        if not isinstance(given.get(name, name), (str, PathLike)) or given.get(name) == "":
            raise UsageError(f"{name} must be a file or name of `matcher weights list`, not {given[name]!r}")
    if "device" in given:
        given["device"] = str(given["device"]).lower()
    if "precision" in given:
        precision = str(given["precision"]).lower().removeprefix("torch.")
        given["precision"] = _PRECISIONS.get(precision, precision)
    for name in ("max_keypoints", "resize", "max_pixels"):
        if name in given and (type(given[name]) is not int or given[name] < 1):
            raise UsageError(f"{name} must be a whole number of at least 1, not {given[name]!r}")
    check_number(given.get("match_threshold", 0.0), "match_threshold", 0, 1)
    if check_number(given.get("ratio", 1.0), "ratio", 0, 1) == 0:
        raise UsageError("ratio must be above 0, not 0")
    if given.get("engine", "torch") not in get_args(Engine):
        raise UsageError(f"engine must be one of {', '.join(get_args(Engine))}, not {given['engine']!r}")
    for name in ("upright", "alpha_mask", "bgr", "further_passes", "refine"):
        if not isinstance(given.get(name, True), bool):
            raise UsageError(f"{name} must be True or False, not {given[name]!r}")
    return given


_PRECISIONS = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}  # as users say
GROUP = "matcher.presets"


def plugin_names() -> list[str]:
    """Sorted names of the presets that installed packages add."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def find_plugin(name: str) -> EntryPoint | None:
    """The entry point of a preset, not imported yet; `UsageError`: two packages add one of that name."""
    found = list(entry_points(group=GROUP, name=name))
    packages = sorted({package_of(point) for point in found})
    if len(packages) > 1:
        raise UsageError(f"the preset {name!r} is added by {' and '.join(packages)}; remove one of them")
    return found[0] if found else None


def package_of(point: EntryPoint) -> str:
    """Name and version of the package that adds a preset."""
    return "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def load_plugin(point: EntryPoint) -> Callable[..., Any]:
    """What builds the pipeline; `UsageError`: it cannot be imported, or is no function."""
    try:
        build = point.load()
    except Exception as error:  # whatever its import runs into is that package's fault
        raise UsageError(
            f"the preset {point.name!r} of {package_of(point)} cannot be loaded "
            f"({type(error).__name__}: {error}); update or remove that package"
        ) from error
    if not callable(build):
        raise UsageError(f"the preset {point.name!r} of {package_of(point)} is not a function: {point.value}")
    return build
