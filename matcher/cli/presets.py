"""`matcher presets`."""

from __future__ import annotations

from matcher.cli.messages import show


def presets() -> None:
    """List the presets: front end, matcher and weights."""
    from matcher.config import NearestConfig, NetworkConfig
    from matcher.plugins import find_plugin, package_of, plugin_names
    from matcher.presets import DEFAULT_PRESET, PRESETS

    for name, config in PRESETS.items():
        if isinstance(config.matcher, NetworkConfig):
            context = config.matcher.context
            heads = f"{context.heads} head{'' if context.heads == 1 else 's'}"
            how = f"{context.depth} layers of {context.dim}-d, {heads}; weights {config.weights}"
        elif isinstance(config.matcher, NearestConfig):
            how = f"mutual nearest neighbours, ratio {config.matcher.ratio:g}"
        else:
            how = type(config.matcher).__name__.removesuffix("Config")
        if isinstance(config.matcher, NetworkConfig) and config.matcher.backbone is not None:
            source = f"all cells of the 1/8 grid of {config.extractor.resize} pixels"
        else:
            source = f"{config.extractor.max_keypoints} {config.extractor.kind} keypoints"
        default = " (default)" if name == DEFAULT_PRESET else ""
        show(f"{name + default:<24} {source}; {how}")
    for name in plugin_names():
        if name not in PRESETS:
            show(f"{name:<24} added by {package_of(find_plugin(name))}")
