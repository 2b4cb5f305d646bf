"""What `matcher sfm --dry-run` prints for photos."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from matcher.cli.collecting import is_run, suggestion
from matcher.cli.messages import show

if TYPE_CHECKING:
    from matcher.collection.sources import FeatureSource


def preview_photos(
    source: FeatureSource, run: Path, out: Path, wanted: dict[str, Any], limits: dict[str, int]
) -> int:
    """Print what would be matched and reconstructed."""
    from matcher.collection.pair_choice import default_choice
    from matcher.collection.sources import check_masks

    names, _ = source.names()
    masked = check_masks(source)
    show(f"images: {len(names)}" + ("" if masked is None else f", {masked} with a mask"))
    if wanted:
        ((method, value),) = wanted.items()
        show(f"pairs: --{method.replace('file', 'pairs')}" + ("" if value is True else f" {value}"))
    else:
        show(f"pairs: {suggestion(default_choice(len(names), **limits), len(names))}")
    show(f"would {'continue' if is_run(run) else 'create'} {run}, then create {out}")
    return 0
