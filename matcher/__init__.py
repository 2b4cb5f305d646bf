"""Image feature matching: keypoints in, verified matches out.

    import matcher

    result = matcher.load().match("a.jpg", "b.jpg")
    result.points0, result.points1, result.scores

Names are resolved when they are first used, so that importing the package costs nothing.
"""

from importlib import import_module

_PUBLIC = {
    "load": "matcher.loading",
    "tiled": "matcher.tiling",
    "align": "matcher.alignment.align",
    "match_set": "matcher.collection.collection",
    "find": "matcher.alignment.find",
    "stitch": "matcher.alignment.stitch",
    "Pipeline": "matcher.pipeline",
    "Collection": "matcher.collection.collection",
    "PRESETS": "matcher.presets",
    "Alignment": "matcher.alignment.align",
    "Camera": "matcher.cameras",
    "Detections": "matcher.alignment.find",
    "Features": "matcher.types",
    "Image": "matcher.types",
    "KeyframeMap": "matcher.sequence.keyframe_map",
    "Map": "matcher.localization.map",
    "MatchedSet": "matcher.collection.collection",
    "Matches": "matcher.types",
    "Pose": "matcher.localization.pose",
    "Result": "matcher.result",
    "Tracker": "matcher.sequence.tracker",
    "FrameResult": "matcher.sequence.frames",
    "TemplateFinder": "matcher.alignment.find",
    "TwoViewGeometry": "matcher.types",
    "read_image": "matcher.images",
    "MatcherError": "matcher.errors",
    "UsageError": "matcher.errors",
    "ImageError": "matcher.errors",
    "ImageWarning": "matcher.errors",
    "IntegrityError": "matcher.errors",
}

__version__ = "1.0.0"
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'matcher' has no attribute {name!r}; it has {', '.join(_PUBLIC)}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
