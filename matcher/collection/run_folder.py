"""The folder of a run: created if missing, and cleared of a store's own files."""

from __future__ import annotations

import os
from pathlib import Path

from matcher.collection import schema
from matcher.collection.descriptors import file_path
from matcher.collection.locking import StoreLock
from matcher.collection.refined_keypoints import delete_refined
from matcher.collection.run_files import check_files
from matcher.errors import UsageError


def check_writable(folder: Path) -> None:
    """Create the folder if it is missing.

    Raises:
        UsageError: it cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made ({error.strerror}); name another folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{folder} cannot be written; name another folder")


def delete_store(run_dir: Path) -> None:
    """Delete a store's own files and leave all others.

    Raises:
        UsageError: a run is writing it, `run.db` is a database of something else, or a file is a folder.
    """
    check_files(run_dir)
    descriptors = [*run_dir.glob(file_path(run_dir, 0).name.replace("00000", "[0-9]*"))]
    if folders := [path for path in descriptors if path.is_dir() and not path.is_symlink()]:
        raise UsageError(f"{folders[0]} is a folder, which no run makes; move it away")
    if not schema.is_store(run_dir / schema.DATABASE):
        raise UsageError(
            f"{run_dir / schema.DATABASE} is no store of a matcher run, so restart=True does not delete it: "
            "move it away, or name another run_dir"
        )
    lock = StoreLock(run_dir)
    try:
        for suffix in ("-wal", "-shm", "-journal", ""):
            (run_dir / f"{schema.DATABASE}{suffix}").unlink(missing_ok=True)
        delete_refined(run_dir)
        for path in descriptors:
            path.unlink()
    finally:
        lock.release()
