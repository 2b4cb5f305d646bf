"""The statistics of a reconstruction, for `matcher sfm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matcher.collection.reconstruction.reconstruct import Reconstruction
    from matcher.collection.store import Store


def resized_scale(store: Store) -> float | None:
    """Resized size / stored size of the largest image; None if none was resized."""
    settings = store.settings
    resize = settings.get("config", {}).get("extractor", {}).get("resize")
    if not resize or settings.get("source", {}).get("kind") != "photos":
        return None
    longest = max((max(image.size) for image in store.images()), default=0)
    return resize / longest if longest > resize else None


def summary_lines(made: Reconstruction, scale: float | None) -> list[str]:
    """The statistics of a reconstruction, as lines to print."""
    from matcher.collection.reconstruction.simpler_cameras import SIMPLE
    from matcher.collection.reconstruction.sparse_models import PLOT

    model = made.largest
    error = f"{model.mean_reprojection_error:.3f} px of the stored image"
    if scale is not None:
        error += f", {model.mean_reprojection_error * scale:.3f} px of the resized image"
    lines = [
        *made.export.notes,
        *(f"left out: {reason}" for reason in made.export.left_out),
        f"registered images: {model.registered} of {made.images}",
        f"points: {model.points}, observations: {model.observations}",
        f"mean track length: {model.mean_track_length:.2f}",
        f"mean reprojection error: {error}",
    ]
    if model.began_simply:
        lines.append(
            f"the mapping began with {SIMPLE} cameras, because with the ones asked for fewer images were "
            "registered; these were adjusted afterwards"
        )
    if (place := model.georegistration) is not None:
        latitude, longitude, _ = place["origin"]
        near = f"{place['images']} positions agree to {place['median_error_metres']:.1f} m (median)"
        lines.append(f"in metres, x east, y north, z up, from {latitude:.6f}, {longitude:.6f}: {near}")
    elif model.positions_unused is not None:
        lines.append(
            f"without a place or metres: the positions in the photos are not used, since "
            f"{model.positions_unused}"
        )
    if len(made.models) > 1:
        sizes = ", ".join(str(other.registered) for other in made.models[1:])
        shared = {
            name for other in made.models[1:] for name in other.cam_from_world
        } & model.cam_from_world.keys()
        word = "model" if len(made.models) == 2 else "models"
        verb = "is" if len(shared) == 1 else "are"
        where = f", of which {len(shared)} {verb} in it, too" if shared else ""
        lines.append(f"{len(made.models) - 1} more {word}: {sizes} images{where}")
    return [*lines, f"wrote {made.folder} (look at {made.folder / PLOT})"]
