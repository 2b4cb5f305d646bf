"""The local map: the last frame, the keyframes and the tracks, and how a new frame joins them."""

from __future__ import annotations

from collections import deque

import numpy as np

from matcher.data.matches import Matches
from matcher.sequence.frames import FrameLinks, FrameStatus
from matcher.sequence.guided import Guide
from matcher.sequence.keyframe_refinement import KeyframeRefinement
from matcher.sequence.keyframes import KeptFrame, KeyframeRule, median_parallax, share_left, through
from matcher.sequence.linking import Linker
from matcher.sequence.lost_tracks import LostTracks
from matcher.sequence.pose_tracking import PoseTracker
from matcher.sequence.relocalisation import KeyframeIndex, MatchPairs, verify_candidates
from matcher.sequence.tracks import TrackIds

CLOSE = 40.0  # baselines; the depths of nearer points show how far the camera moved
CANDIDATES = 3  # keyframes that a lost frame is compared with


class LocalMap:
    """The last frame, the keyframes and the tracks; bounded by the window of keyframes."""

    def __init__(
        self,
        linker: Linker,
        poses: PoseTracker,
        window: int,
        rule: KeyframeRule,
        baseline: float | None,
        refinement: KeyframeRefinement,
    ) -> None:
        self.linker, self.poses, self.index = linker, poses, KeyframeIndex()
        self._refinement = refinement
        self.keyframes: deque[KeptFrame] = deque(maxlen=window)
        self.previous: KeptFrame | None = None
        self._keyframe: KeptFrame | None = None
        self._close = None if baseline is None else CLOSE * baseline
        self._rule, self._tracks, self._missing = rule, TrackIds(), LostTracks()
        self._guide: Guide | None = None

    def link(
        self, current: KeptFrame, matches: Matches | None, match: MatchPairs
    ) -> tuple[FrameStatus, FrameLinks | None, FrameLinks | None]:
        """Links to the previous frame and the keyframe; where both fail, to any keyframe that fits."""
        previous, keyframe = self.previous, self._keyframe
        if previous is None:
            return "first", None, None
        to_previous, self._guide = self.linker.verify(previous, current, matches)
        if keyframe is previous:
            to_keyframe = to_previous
        else:
            to_keyframe = self.linker.complete(keyframe, current, through(keyframe, previous, to_previous))
            if not to_keyframe.consistent.any():
                direct = match([(keyframe.features, current.features)])[0]
                to_keyframe, _ = self.linker.verify(keyframe, current, direct)
        if to_keyframe.consistent.any():
            return "tracked", to_previous, to_keyframe
        if to_previous.consistent.any():  # the keyframe is out of sight before another was made
            self._keep(previous)
            return "tracked", to_previous, to_previous
        others = [kept for kept in self.keyframes if kept is not keyframe and kept is not previous]
        likely = self.index.candidates(current, others, CANDIDATES)
        if (found := verify_candidates(match, self.linker, current, likely)) is not None:
            self._keyframe = found[0]
            return "tracked", to_previous, found[1]
        return "lost", to_previous, None

    def identify(
        self, current: KeptFrame, to_previous: FrameLinks | None, to_keyframe: FrameLinks | None
    ) -> np.ndarray:
        """Give the points their track ids; returns their lengths."""
        offers = [
            (earlier.track_ids, links.indices[links.consistent])
            for earlier, links in ((self.previous, to_previous), (self._keyframe, to_keyframe))
            if links is not None
        ]
        if to_previous is not None and self.linker.guided:
            taken = np.concatenate([indices[:, 1] for _, indices in offers])
            offers.append((self._missing.track_ids, self._missing.find(current, taken, self._guide)))
        current.track_ids, lengths = self._tracks.extend(len(current.keypoints), offers)
        if to_previous is not None:
            self._missing.update(self.previous, current, to_previous, self._guide)
        return lengths

    def refine(self, current: KeptFrame, links: FrameLinks | None) -> None:
        """Refine the points of the frame against the keyframe that the links lead to."""
        if links is not None:
            self._refinement.refine(self._keyframe, current, links)

    def place(self, current: KeptFrame, status: FrameStatus, links: FrameLinks | None) -> dict[str, object]:
        """Pose of the frame and whether it becomes a keyframe: fields of its result."""
        keyframe = self._keyframe
        if links is None:
            pose_status = self.poses.begin(current) if status == "first" else self.poses.bridge(current)
            current.begins_anew = status == "lost"
            if self.keyframes and self.keyframes[-1].begins_anew and not self.keyframes[-1].most_links:
                self.keyframes.pop()  # one lost frame after the other must not push out what is known
            self._keep(current)
            return {"is_keyframe": True, "pose_status": pose_status}
        pose_status, T = self.poses.locate(keyframe, current, links)
        kept = share_left(keyframe, links, self._close)
        parallax = median_parallax(keyframe, current.keypoints, links)
        wanted = self._rule.wants(kept, parallax, current.size)
        if wanted and (pose_status in ("ok", "no_camera") or kept < self._rule.kept / 2):
            self.poses.promote(keyframe, current, links, T)
            if pose_status in ("too_few", "starting"):  # later frames could not go on without a pose
                pose_status = self.poses.bridge(current)
            self._keep(current)
        return {
            "is_keyframe": self._keyframe is current,
            "keyframe": keyframe.index,
            "parallax": parallax,
            "kept": kept,
            "pose_status": pose_status,
            "cam_from_keyframe": T,
        }

    def close(self, current: KeptFrame) -> None:
        """The frame becomes the last one; what nothing needs any more is forgotten."""
        self.previous = current
        self._tracks.forget(current.track_ids, self._keyframe.track_ids, self._missing.track_ids)

    def _keep(self, frame: KeptFrame) -> None:
        self._keyframe = frame
        self.keyframes.append(frame)
