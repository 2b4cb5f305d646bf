"""Entry points for `torch.hub.load`.

pipe = torch.hub.load("FOLDER OF A CHECKOUT", "matcher", source="local")
pipe.match("a.jpg", "b.jpg").points0
"""

from importlib import import_module

dependencies = ["torch", "numpy", "cv2", "PIL", "poselib", "safetensors"]


def matcher(preset="hybrid-learned", **options):
    """The pipeline of a preset, as `matcher.load` builds it.

    Args:
        preset: a name in `matcher.PRESETS`.
        options: of `matcher.load`, such as max_keypoints=1024, device="cuda", geometry="homography".

    Raises:
        UsageError: an unknown preset or option.
    """
    return import_module("matcher").load(preset, **options)


def learned(**options):
    """The learned front end, by `extract(image)`, and mutual nearest neighbours of its descriptors."""
    return import_module("matcher").load("nearest-learned", **options)
