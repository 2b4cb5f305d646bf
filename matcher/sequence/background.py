"""Work beside tracking: in a process of its own with low priority, or at once where it must be repeatable."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np

from matcher.errors import MatcherError, UsageError
from matcher.geometry import as_quaternion, as_rotation
from matcher.processes import child_command, child_environment

# --- ordered_work: Small pieces of work, such as writing an image, done in their order: in a thread where
# nobody may wait.

_MOST = 8  # pieces that may wait; so many images are held in memory


class OrderedWork:
    """Does what it is given, one after the other; after a failure nothing more until that was said."""

    def __init__(self, *, beside: bool) -> None:
        """`beside`: in a thread; otherwise at once. The thread ends what it has when the program ends."""
        self._thread = ThreadPoolExecutor(1, "keyframes") if beside else None
        self._process = os.getpid()
        self._waiting: deque[Future[None]] = deque()
        self._failed = False

    def add(self, work: Callable[[], None]) -> None:
        """Do this next; it waits only while too much is waiting.

        Raises:
            Exception: what made this work fail, or in a thread some work before it.
        """
        self._stay_at_home()
        if self._thread is None:
            work()
            return
        if self.is_done() or len(self._waiting) < _MOST:
            self._waiting.append(self._thread.submit(self._do, work))
            return
        self._waiting[0].exception()  # waits
        self.add(work)

    def is_done(self) -> bool:
        """Whether nothing is waiting.

        Raises:
            Exception: what made some work fail; what came after it is not done.
        """
        self._stay_at_home()
        while self._waiting and self._waiting[0].done():
            problem = self._waiting.popleft().exception()
            if problem is not None:
                for rest in self._waiting:
                    rest.exception()  # waits; it is passed over
                self._waiting.clear()
                self._failed = False
                raise problem
        return not self._waiting

    def wait(self) -> None:
        """Until all is done.

        Raises:
            Exception: as of `is_done`.
        """
        while not self.is_done():
            self._waiting[0].exception()

    def _stay_at_home(self) -> None:
        """A forked child has no thread: what waits is its parent's, and what is new is done at once."""
        if os.getpid() != self._process:
            self._process, self._thread = os.getpid(), None
            self._waiting.clear()

    def _do(self, work: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            work()
        except BaseException:
            self._failed = True
            raise


# --- background: Work beside tracking: in a process of its own with low priority, or at once where it must
# be repeatable.

Timing = Literal["background", "inline"]
TIMINGS: tuple[Timing, ...] = ("background", "inline")
_PROGRAM = "matcher.sequence.background_child"
_GRACE = 2.0  # seconds that an idle process has to end by itself

Task = Callable[[Any], Any]  # can be pickled; from a request to an answer


def start(task: Task, timing: Timing) -> Inline | Background:
    """Where the task runs.

    Raises:
        UsageError: an unknown timing, or "background" on a system where a child inherits no sockets.
    """
    if timing not in TIMINGS:
        raise UsageError(f"the timing must be {' or '.join(TIMINGS)}, not {timing!r}")
    return Inline(task) if timing == "inline" else Background(task)


class Inline:
    """In this process, while the caller waits: the same answers every time."""

    beside = False  # whether it needs a core of its own
    problem: str | None = None

    def __init__(self, task: Task) -> None:
        self._task = task
        self._answers: list[Any] = []

    @property
    def busy(self) -> bool:
        """Whether a request is worked on."""
        return False

    def offer(self, request: Any) -> None:
        """Work on a request."""
        self._answers.append(self._task(request))

    def unanswered(self) -> list[Any]:
        """There are none."""
        return []

    def answers(self, *, wait: bool | float = False) -> list[Any]:
        """What has been found since the last call."""
        found, self._answers = self._answers, []
        return found

    def close(self) -> None:
        """There is nothing to end."""


class Background:
    """In a child process. One request is worked on; of those that come meanwhile the last is kept."""

    beside = True

    def __init__(self, task: Task) -> None:
        if os.name != "posix":
            raise UsageError('work in the background needs Linux or macOS; use "inline" here')
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                child_command(_PROGRAM, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                env=child_environment(threads=1),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._connection.send_bytes(pickle.dumps(task))
        self._sending = OrderedWork(beside=True)  # a frame is more than the socket holds
        self._now: tuple[Any] | None = None
        self._next: tuple[Any] | None = None
        self.busy = True  # until it says that it is ready
        self.problem: str | None = None  # why there will be no more answers

    def offer(self, request: Any) -> Any | None:
        """Have a request worked on as soon as the one before is done; it takes no time here.

        It must not change afterwards. Returns the request whose place it has taken, if one was waiting.
        """
        replaced, self._next = self._next, (request,)
        self._send()
        return None if replaced is None else replaced[0]

    def unanswered(self) -> list[Any]:
        """Requests that are worked on, or will be next."""
        return [held[0] for held in (self._now, self._next) if held is not None]

    def answers(self, *, wait: bool | float = False) -> list[Any]:
        """What has been found since the last call.

        Args:
            wait: until everything that was offered is done; seconds: no longer than this for the next answer.

        Raises:
            MatcherError: what made a request fail; others can follow.
        """
        found = []
        seconds = None if wait is True else float(wait)
        while self.problem is None and self.busy and self._connection.poll(seconds):
            try:
                answer = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                self.problem = f"the process ended early (code {self._process.wait()})"
                break
            self.busy, self._now = False, None
            seconds = seconds if wait is True else 0.0
            self._send()
            if isinstance(answer, MatcherError):
                raise answer
            if answer is not None:  # it is ready
                found.append(answer)
        return found

    def close(self) -> None:
        """End the process, whatever it does."""
        if not self.busy:
            self._connection.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with what it has started, such as COLMAP
        self._process.wait()
        with suppress(OSError):
            self._sending.wait()
        self._connection.close()

    def _send(self) -> None:
        if self.busy or self._next is None or self.problem is not None:
            return
        self._now, self._next = self._next, None
        (request,) = self._now
        self.busy = True
        try:
            self._sending.add(lambda: self._connection.send_bytes(pickle.dumps(request)))
        except OSError:
            self.problem = "the process ended early"


# --- late_poses: Frames of a sequence that had no pose in a map, or a poor one, when they were tracked: one
# at the end.

_MOVED = 2.0  # standard deviations of the positions, by which two of them must be apart to say the unit
_NEAR = 12  # localised frames that say the unit beyond the first and the last
_HELD = 16  # requests of a sequence that nobody worked on; each holds a frame's pixels

Request = tuple[int, Any, Any, np.ndarray, Any]  # index, pixels, mask, world_from_cam, camera


@dataclass(frozen=True, eq=False)
class LocalizedFrame:
    """A frame that was localised in the map."""

    index: int
    world_from_cam: np.ndarray  # (4, 4), in the coordinates of tracking
    map_from_cam: np.ndarray  # (4, 4), in those of the map
    deviation: float  # standard deviation of its position, the map's units


def unit_of(localized: Sequence[LocalizedFrame], assumed: float | None) -> float | None:
    """The map's units in one of tracking; `assumed` where no two frames are far enough apart to say it."""
    ratios = []
    for before, after in pairwise(localized):
        there = np.linalg.norm(after.map_from_cam[:3, 3] - before.map_from_cam[:3, 3])
        here = np.linalg.norm(after.world_from_cam[:3, 3] - before.world_from_cam[:3, 3])
        if here > 0 and there > _MOVED * np.hypot(before.deviation, after.deviation):
            ratios.append(there / here)
    return float(np.median(ratios)) if ratios else assumed


def moved_from(near: LocalizedFrame, world_from_cam: np.ndarray, unit: float | None) -> np.ndarray | None:
    """map_from_cam (4, 4) of a frame, from one that was localised; None where the unit is needed."""
    step = np.linalg.inv(near.world_from_cam) @ world_from_cam
    if unit is None and np.linalg.norm(step[:3, 3]) > 0:
        return None
    step[:3, 3] *= 1.0 if unit is None else unit
    return near.map_from_cam @ step


def _placed(
    ordered: Sequence[LocalizedFrame], index: int, world_from_cam: np.ndarray, unit: float | None
) -> np.ndarray | None:
    """map_from_cam (4, 4) of a frame; between two that were localised, drift is spread over the time."""
    before = [frame for frame in ordered if frame.index <= index]
    after = [frame for frame in ordered if frame.index >= index]
    if not before or not after:
        return moved_from((before or after[:1])[-1], world_from_cam, unit)
    ends = before[-1], after[0]
    share = (index - ends[0].index) / max(1, ends[1].index - ends[0].index)
    # Tracking with one camera loses its unit little by little, so these two know it best.
    own = unit_of(ends, unit)
    found = [moved_from(end, world_from_cam, own) for end in ends]
    if found[0] is None or found[1] is None:
        return found[round(share)]
    return _mean(found[0], found[1], share)


def _mean(first: np.ndarray, second: np.ndarray, share: float) -> np.ndarray:
    """A pose (4, 4) between two, `share` of the way to the second."""
    turns = [as_quaternion(pose[:3, :3]) for pose in (first, second)]
    turns[1] = turns[1] if turns[0] @ turns[1] >= 0 else -turns[1]
    pose = (1 - share) * first + share * second
    turn = (1 - share) * turns[0] + share * turns[1]
    pose[:3, :3] = as_rotation(turn)
    return pose


@dataclass(eq=False)
class _Stretch:
    """Frames between two losses of tracking: one system of coordinates."""

    start: int
    without: dict[int, np.ndarray] = field(default_factory=dict)  # index → world_from_cam
    localized: list[LocalizedFrame] = field(default_factory=list)

    def poses(self, assumed: float | None) -> dict[int, np.ndarray]:
        """map_from_cam of frames that have none, each from the localised frames before and after it."""
        if not self.localized:
            return {}
        ordered, found = sorted(self.localized, key=lambda frame: frame.index), {}
        units = [unit_of(some, assumed) for some in (ordered[:_NEAR], ordered, ordered[-_NEAR:])]
        for index, pose in self.without.items():
            unit = units[int(index >= ordered[0].index) + int(index > ordered[-1].index)]
            if (placed := _placed(ordered, index, pose, unit)) is not None:
                found[index] = placed
        return found

    def says_more(self, index: int) -> bool:
        """Whether a frame without a pose in the map is nearer in time to this one than to any localised."""
        return any(
            all(abs(other - index) < abs(other - frame.index) for frame in self.localized)
            for other in self.without
        )


class LatePoses:
    """Remembers frames without a good pose in the map, and what is needed to give them one.

    Memory: a pose a frame, and the pixels of up to 16 frames that were to be localised when the process that
    does so was busy, spread over the sequence.
    """

    def __init__(self, assumed: float | None) -> None:
        """Set up; `assumed`: the map's units in one of tracking, None with one camera."""
        self._assumed = assumed
        self._stretches = [_Stretch(0)]
        self._missed: list[Request] = []

    def lose(self, index: int) -> None:
        """Tracking was lost at this frame."""
        self._stretches.append(_Stretch(index))

    def lack(self, index: int, world_from_cam: np.ndarray) -> None:
        """A frame has no pose in the map yet, or one that may become better."""
        self._stretches[-1].without[index] = world_from_cam

    def missed_after(self, index: int) -> bool:
        """Whether frames after this one were to be localised and could not be in time."""
        return bool(self._missed) and self._missed[-1][0] > index

    def miss(self, request: Request) -> None:
        """A frame was to be localised, but others came after it before it could be."""
        self._missed.append(request)
        if len(self._missed) > _HELD:
            gaps = [after[0] - before[0] for before, after in pairwise(self._missed)]
            joined = [left + right for left, right in pairwise(gaps)]
            del self._missed[1 + int(np.argmin(joined))]  # the first and the last say most of the unit

    def take(self, frame: LocalizedFrame) -> None:
        """A frame was localised, of whichever stretch."""
        self._of(frame.index).localized.append(frame)

    def open_requests(self) -> Iterator[Request]:
        """Frames that were missed, as long as others without a pose in time are nearest to them."""
        while self._missed:
            request = self._missed.pop()
            if self._says_more(request):
                yield request

    @property
    def wanted(self) -> int:
        """How many frames `open_requests` gives at most."""
        return sum(map(self._says_more, self._missed))

    def _says_more(self, request: Request) -> bool:
        return self._of(request[0]).says_more(request[0])

    def poses(self) -> dict[int, np.ndarray]:
        """map_from_cam (4, 4) of frames that had none when they were tracked, or a poor one, by index."""
        return {i: pose for stretch in self._stretches for i, pose in stretch.poses(self._assumed).items()}

    def _of(self, index: int) -> _Stretch:
        return next(each for each in reversed(self._stretches) if each.start <= index)
