"""Named configurations, each written as its difference from another."""

from __future__ import annotations

from dataclasses import replace

from matcher.config import (
    GRID_KIND,
    AssignmentConfig,
    BackboneConfig,
    CalibrationConfig,
    ContextConfig,
    MatchingPolicy,
    NearestConfig,
    NetworkConfig,
    PipelineConfig,
    PositionConfig,
    RefinedCalibrationConfig,
    RefinementConfig,
    SecondPassConfig,
    VerifiedCalibrationConfig,
)
from matcher.errors import UsageError, unknown_name

# Thresholds and shares were chosen for the shipped weights on training photos; see weights/README.md.
_HYBRID = PipelineConfig(
    matcher=NetworkConfig(
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
    ),
    weights="hybrid",
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
_LIGHTGLUE_ORIENTED = replace(
    _LIGHTGLUE_128, kind="sift", position=PositionConfig(inputs=("xy", "raw_sigma", "raw_orientation"))
)
_LIGHTERGLUE = replace(
    _LIGHTGLUE,
    kind="xfeat",
    descriptor_dim=64,
    project=True,
    context=ContextConfig(dim=96, heads=1, depth=6),
    policy=MatchingPolicy(early_exit=False, prune_matchability=0.05, prune_confident_only=False),
)
# LoFTR, Sun et al. 2021: cells of a grid, linear attention, dual softmax, windows on a finer map.
_LOFTR = NetworkConfig(
    kind="loftr",
    descriptor_dim=256,
    project=False,
    position=PositionConfig(kind="sine", frequencies="steep"),
    context=replace(RefinementConfig().context, dim=256, depth=4),
    assignment=AssignmentConfig(
        kind="dual_softmax", dustbin="none", every_layer=False, project=False, temperature=0.1, border=2
    ),
    policy=MatchingPolicy(match_threshold=0.2, early_exit=False, pruning=False),
    backbone=BackboneConfig(),
    refinement=RefinementConfig(),
)
# The assignment of the networks that were published as "ot" beside those of dual softmax ("ds").
LOFTR_TRANSPORT = replace(
    _LOFTR.assignment,
    kind="sinkhorn",
    dustbin="learned",
    temperature=1.0,
    max_iterations=3,
    tolerance=None,
    drop_unmatched=True,
)
# Points of a grid lie on no corner, and the network has refined them.
_ON_GRID = replace(_HYBRID, extractor=replace(_HYBRID.extractor, kind=GRID_KIND, resize=640), refine=None)
_BY_CONTENT = {"soft_resize": 640, "sparse_resize": 1024}
_ON_LEARNED = replace(_HYBRID, extractor=replace(_HYBRID.extractor, kind="learned", **_BY_CONTENT))
_ON_SUPERPOINT = replace(_HYBRID, extractor=replace(_HYBRID.extractor, kind="superpoint"))

PRESETS: dict[str, PipelineConfig] = {
    "hybrid": _HYBRID,
    "hybrid-learned": replace(
        _ON_LEARNED,
        matcher=replace(
            _HYBRID.matcher,
            kind="learned",
            descriptor_dim=64,
            position=PositionConfig(inputs=("xy",)),
            context=replace(_HYBRID.matcher.context, scale_logits_above=384),
            policy=replace(
                _HYBRID.matcher.policy,
                match_threshold=0.05,
                exit_share=0.9,
                prune_matchability=0.01,
                calibration=CalibrationConfig(
                    offset=0.8,
                    slope=0.58,
                    share_slope=0.49,
                    refined=RefinedCalibrationConfig(
                        offset=0.9, slope=0.85, refined=1.75, variance_slope=-0.31, further_passes=-1.56
                    ),
                    verified=VerifiedCalibrationConfig(
                        offset=-2.0, slope=0.58, inlier=1.85, share_slope=0.43
                    ),
                ),
            ),
        ),
        weights="hybrid-learned",
        second_pass=SecondPassConfig(),
    ),
    "nearest": replace(_HYBRID, matcher=NearestConfig(), weights=None),
    "nearest-learned": replace(_ON_LEARNED, matcher=NearestConfig(ratio=0.91), weights=None),
    "superglue-indoor": replace(_ON_SUPERPOINT, matcher=_SUPERGLUE, weights="superglue-indoor"),
    "superglue-outdoor": replace(_ON_SUPERPOINT, matcher=_SUPERGLUE, weights="superglue-outdoor"),
    "lightglue-superpoint": replace(_ON_SUPERPOINT, matcher=_LIGHTGLUE, weights="lightglue-superpoint"),
    "lightglue-disk": replace(
        _HYBRID,
        extractor=replace(_HYBRID.extractor, kind="disk"),
        matcher=_LIGHTGLUE_128,
        weights="lightglue-disk",
    ),
    "lightglue-aliked": replace(
        _HYBRID,
        extractor=replace(_HYBRID.extractor, kind="aliked"),
        matcher=replace(_LIGHTGLUE_128, kind="aliked"),
        weights="lightglue-aliked",
    ),
    "lightglue-sift": replace(_HYBRID, matcher=_LIGHTGLUE_ORIENTED, weights="lightglue-sift"),
    "lightglue-doghardnet": replace(
        _HYBRID,
        extractor=replace(_HYBRID.extractor, kind="doghardnet"),
        matcher=replace(
            _LIGHTGLUE_ORIENTED,
            kind="doghardnet",
            position=PositionConfig(inputs=("xy", "raw_scale", "raw_counterclockwise")),
        ),
        weights="lightglue-doghardnet",
    ),
    "lightglue-keynet": replace(
        _HYBRID,
        extractor=replace(_HYBRID.extractor, kind="keynet"),
        matcher=replace(
            _LIGHTGLUE_128,
            kind="keynet",
            position=PositionConfig(inputs=("xy", "frame")),
            policy=MatchingPolicy(early_exit=False, pruning=False),
        ),
        weights="lightglue-keynet",
    ),
    "lightglue-dedodeb": replace(
        _HYBRID,
        extractor=replace(_HYBRID.extractor, kind="dedodeb"),
        matcher=replace(_LIGHTGLUE, kind="dedodeb"),
        weights="lightglue-dedodeb",
    ),
    "lightglue-dedodeg": replace(
        _HYBRID,
        extractor=replace(_HYBRID.extractor, kind="dedodeg"),
        matcher=replace(_LIGHTGLUE, kind="dedodeg"),
        weights="lightglue-dedodeg",
    ),
    "lightglue-xfeat": replace(
        _HYBRID,
        extractor=replace(_HYBRID.extractor, kind="xfeat"),
        matcher=_LIGHTERGLUE,
        weights="lightglue-xfeat",
    ),
    "loftr-outdoor": replace(
        _ON_GRID,
        extractor=replace(_ON_GRID.extractor, resize=840),
        matcher=_LOFTR,
        weights="loftr-outdoor",
    ),
    "loftr-indoor": replace(_ON_GRID, matcher=_LOFTR, weights="loftr-indoor"),
    "loftr-indoor-new": replace(
        _ON_GRID,
        matcher=replace(_LOFTR, position=PositionConfig(kind="sine")),
        weights="loftr-indoor-new",
    ),
}
DEFAULT_PRESET = "hybrid-learned"


def find_preset(name: str) -> PipelineConfig:
    """The configuration of that name in `PRESETS`.

    Raises:
        UsageError: there is none; the message lists those that exist.
    """
    if name not in PRESETS:
        raise UsageError(unknown_name("preset", name, PRESETS))
    return PRESETS[name]
