"""What `matcher track` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matcher.sequence.closed_trajectory import ClosedTrajectory
    from matcher.sequence.log import TrackingLog
    from matcher.sequence.tracker import Tracker


def as_object(
    log: TrackingLog, tracker: Tracker, poses: int, compared: tuple[Any, Any, Any] | None
) -> dict[str, Any]:
    """What `--json` prints."""
    choice = tracker.choice
    return {
        "preset": tracker.pipeline.preset,
        "frames": len(log),
        "statuses": log.counts(),
        "poses": poses,
        **({"in_map": True} if log.in_map else {}),
        "mean_track_length": round(log.mean_track_length(), 3),
        "choice": None if choice is None else {**vars(choice), "text": str(choice)},
        "milliseconds": {
            stage: {name: round(value, 2) for name, value in row.items()}
            for stage, row in tracker.latency().items()
        },
        "segments": None if compared is None else [vars(error) for error in compared[2]],
    }


def title_of(found: dict[str, Any]) -> str:
    """The line above a plot."""
    errors = ", ".join(
        f"{100 * e['translation']:.2f} % and {e['rotation']:.4f} °/m over {e['length']:.0f} m"
        for e in found["segments"] or []
    )
    return f"{found['preset']}, {found['frames']} frames" + (f": {errors}" if errors else "")


def summary_of(found: dict[str, Any]) -> str:
    """The same as readable lines."""
    statuses = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in found["statuses"].items())
    lines = [
        f"{found['frames']} frames ({statuses}), {found['poses']} with a pose",
        f"mean length of tracks over two or more frames: {found['mean_track_length']:.2f} frames",
    ]
    if found.get("in_map"):
        lines.append(f"{found['poses']} of {found['frames']} frames have a pose in the map")
    if found["choice"]:
        lines.append(found["choice"]["text"])
    lines += [
        f"{e['count']} segments of {e['length']:.0f} m: {100 * e['translation']:.2f} % translation, "
        f"{e['rotation']:.4f} degrees per metre"
        for e in found["segments"] or []
    ]
    lines += [
        f"{stage:8}{row['p50']:8.1f} ms median{row['p95']:8.1f} ms 95th percentile"
        for stage, row in found["milliseconds"].items()
    ]
    return "\n".join(lines)


def closing_of(closed: ClosedTrajectory) -> str:
    """What the map of the keyframes says, in a line."""
    moved = closed.moved()
    loops = f"{len(closed.loops)} pairs of keyframes close loops" if closed.loops else "no loop was found"
    if closed.alike:
        loops += f", {closed.alike} pairs only look alike and are left out, as the path says"
    loops += "" if closed.problem is None else f" ({closed.problem})"
    return (
        f"map of the keyframes: {closed.folder}; {loops}; poses moved by {moved.mean():.3f} on average, "
        f"{moved.max():.3f} at most ({closed.folder.parent / 'trajectory.tum'})"
    )
