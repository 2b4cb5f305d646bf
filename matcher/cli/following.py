"""Frames of a source pushed to a tracker, one after the other."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from matcher.cli.exits import exit_code_of
from matcher.cli.interruptions import whole_step
from matcher.cli.messages import complain, say

if TYPE_CHECKING:
    from matcher.sequence.capture import FrameSource, SourceFrame
    from matcher.sequence.log import TrackingLog
    from matcher.sequence.recording import Recording
    from matcher.sequence.tracker import Tracker


def follow(
    source: FrameSource,
    tracker: Tracker,
    limit: int | None,
    stereo: bool,
    recordings: list[Recording],
) -> tuple[TrackingLog, int, int | None]:
    """Push every frame; one that cannot be read counts as dropped. Ctrl-C ends the source, not the run.

    Returns:
        What was tracked, frames that could not be read, and the exit code where tracking was ended.
    """
    from matcher.errors import ImageError
    from matcher.sequence.log import TrackingLog

    log, failures, ended = TrackingLog(), 0, None
    try:
        for shot in source:
            with whole_step():  # a frame is in all that is kept, or in nothing
                try:
                    result = _push(tracker, shot, stereo)
                except ImageError as error:
                    complain(f"{error}; the frame is skipped")
                    failures += 1
                    result = tracker.push(None, shot.timestamp)
                log.add(result)
                for recording in recordings:
                    image = None if result.passed_over else tracker.pipeline.read(shot.image)
                    recording.add(result, image)
            if limit is not None and len(log) >= limit:
                break
    except KeyboardInterrupt:
        say("stopped")
    except SystemExit as stop:  # SIGTERM
        say("terminated")
        ended = int(stop.code or 0)
    except OSError as error:  # a full disk ends tracking, and what was tracked is written all the same
        ended = exit_code_of(error)
    if source.problem is not None:
        complain(str(source.problem))
        failures += 1
    if not any(log.counts().get(status) for status in ("first", "tracked", "lost", "blank")):
        if ended is not None:
            sys.exit(ended)
        raise ImageError(f"{source.name}: no frame could be read")
    return log, failures, ended


def _push(tracker: Tracker, shot: SourceFrame, stereo: bool) -> Any:
    if stereo:
        return tracker.push_stereo(shot.image, shot.right, shot.timestamp, mask=shot.mask)
    return tracker.push(shot.image, shot.timestamp, mask=shot.mask)
