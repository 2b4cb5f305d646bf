"""Image feature matching: keypoints in, verified matches out.

    import matcher

    result = matcher.load().match("a.jpg", "b.jpg")
    result.points0, result.points1, result.scores

Names are resolved when they are first used, so that importing the package costs nothing.
"""

from importlib import import_module

_PUBLIC = {
    "load": "matcher.pipeline",
    "Pipeline": "matcher.pipeline",
    "Collection": "matcher.collection.collection",
    "PRESETS": "matcher.presets",
    "Camera": "matcher.types",
    "Features": "matcher.types",
    "Image": "matcher.types",
    "Matches": "matcher.types",
    "Result": "matcher.types",
    "Sequence": "matcher.sequence.tracker",
    "FrameResult": "matcher.sequence.frames",
    "TwoViewGeometry": "matcher.types",
    "read_image": "matcher.images",
    "plot_result": "matcher.drawing.matches",
    "MatcherError": "matcher.types",
    "UsageError": "matcher.types",
    "ImageError": "matcher.types",
    "IntegrityError": "matcher.types",
}

__version__ = "0.1.0"
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'matcher' has no attribute {name!r}; public names: {', '.join(_PUBLIC)}"
        )
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
