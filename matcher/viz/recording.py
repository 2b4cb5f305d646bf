"""Files and live views of the rerun viewer."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from matcher.cameras import Camera
from matcher.errors import UsageError, optional
from matcher.files import temporary_name


class RecordingFile(AbstractContextManager):
    """A recording that appears whole when it is closed, or the viewer, which shows it as it grows."""

    def __init__(self, path: str | Path | None) -> None:
        """Open an .rrd file, replaced when the recording is closed, or, with None, the viewer; `UsageError`:
        rerun is not installed, or there is no display for the viewer."""
        self.rr: Any = import_rerun()
        self.views = self.rr.blueprint  # the kinds of views that there are
        self._path = None if path is None else Path(path)
        self._part: Path | None = None
        self.stream = self.rr.RecordingStream("matcher")
        if self._path is None:
            shown = any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
            if sys.platform.startswith("linux") and not shown:
                raise UsageError("there is no display for the viewer; write a recording (FILE.rrd) instead")
            self.stream.spawn()
        else:
            self._part = temporary_name(self._path)
            self.stream.save(self._part)
        self.stream.log("world", self.rr.ViewCoordinates.RIGHT_HAND_Y_DOWN, static=True)

    def log_camera(
        self,
        entity: str | list[str],
        world_from_cam: np.ndarray,
        camera: Camera,
        *,
        scale: np.ndarray | None = None,
        size: Sequence[int] | None = None,
        static: bool = False,
        **look: Any,
    ) -> None:
        """A pose at the entity, a path or its parts, and a camera, in stored pixels, at its child `image`.

        `scale` (2,) is of the drawn image, for one pixel of the stored one, `size` that of the drawn image,
        by default the camera's; `static`: at all times; `look` is of rerun's `Pinhole`.
        """
        pose = dict(translation=world_from_cam[:3, 3], mat3x3=world_from_cam[:3, :3])
        self.stream.log(entity, self.rr.Transform3D(**pose), static=static)
        K = camera.K.copy()
        K[:2, 2] += 0.5  # an image is drawn with the centre of its first pixel at (0.5, 0.5)
        if scale is not None:
            K[:2] *= scale[:, None]
        pinhole = self.rr.Pinhole(image_from_camera=K, resolution=size or camera.size, **look)
        image = f"{entity}/image" if isinstance(entity, str) else [*entity, "image"]
        self.stream.log(image, pinhole, static=static)

    def lay_out(self, scene: str, *beside: Any) -> None:
        """Open with the scene large, under this name, beside the other views, which else get as much room."""
        views = self.views
        shown = views.Spatial3DView(origin="world", name=scene)
        columns = views.Horizontal(shown, views.Vertical(*beside), column_shares=[3, 2])
        self.stream.send_blueprint(views.Blueprint(columns, collapse_panels=True))

    def close(self) -> None:
        """Finish the file; `OSError` where the disk is full."""
        try:
            self.stream.flush()
            self.stream.disconnect()
        except RuntimeError as error:  # of a thread that writes, which does not say why it ended
            self.discard()
            raise OSError(errno.ENOSPC, f"{self._path}: cannot be written whole ({error})") from error
        if self._part is not None and self._part.exists():
            self._part.replace(self._path)

    def discard(self) -> None:
        """Leave nothing behind."""
        with suppress(RuntimeError):
            self.stream.disconnect()
        if self._part is not None:
            self._part.unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close() if kind is None else self.discard()


def import_rerun() -> ModuleType:
    """The module, so that a command can refuse before any work; `UsageError` where it is absent."""
    with optional():
        import rerun
    return rerun
