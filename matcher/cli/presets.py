"""`matcher presets`."""

from __future__ import annotations

import typer


def presets() -> None:
    """List the presets."""
    from matcher.config import NetworkConfig
    from matcher.presets import DEFAULT_PRESET, PRESETS

    for name, config in PRESETS.items():
        if isinstance(config.matcher, NetworkConfig):
            context = config.matcher.context
            how = (
                f"{context.depth} layers of {context.dim}-d, {context.heads} heads; weights {config.weights}"
            )
        else:
            how = f"mutual nearest neighbours, ratio {config.matcher.ratio:g}"
        picture = f"{config.extractor.max_keypoints} {config.extractor.kind} keypoints"
        default = " (default)" if name == DEFAULT_PRESET else ""
        typer.echo(f"{name + default:<22} {picture}; {how}")
