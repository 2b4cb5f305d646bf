"""The folder of a run, which belongs to one recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matcher.config_tables import to_dict
from matcher.errors import IntegrityError, UsageError
from matcher.files import is_ours, write_whole
from matcher.lab.pairs.textures import photos_digest
from matcher.lab.train.recipe import Recipe, fingerprint

HELD_OUT = "held_out"  # in recipe.json: a digest of the photos that are validated on


def claim_folder(folder: Path, recipe: Recipe, held_out: Sequence[Path] = ()) -> None:
    """Make the folder of a run, or check that it belongs to this recipe and is validated on these photos.

    Raises:
        UsageError: it is another recipe's, other photos are held out, it holds files but no run, or it cannot
            be made.
        IntegrityError: its recipe.json is damaged or was changed.
    """
    note = folder / "recipe.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            _refuse_files(folder)
            values = {"fingerprint": fingerprint(recipe), "recipe": to_dict(recipe)}
            values |= {HELD_OUT: photos_digest(held_out)} if held_out else {}
            write_whole(note, json.dumps(values, indent=1).encode())
            return
        stored = json.loads(note.read_text(encoding="utf-8"))
        owner, values, photos = stored["fingerprint"], stored["recipe"], stored.get(HELD_OUT)
    except UsageError:  # a ValueError, too
        raise
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UsageError(
            f"{folder}: no run can be kept there ({error.strerror}); give another --run"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{note} is damaged; restore it or delete the run folder") from error
    if owner != fingerprint(recipe):
        changes = ", ".join(differences(values, json.loads(json.dumps(to_dict(recipe)))))
        if not changes:
            raise IntegrityError(
                f"{note} was changed: its fingerprint is not that of the recipe in it; give another --run or "
                "delete the folder"
            )
        raise UsageError(
            f"{folder} holds a run of another recipe ({changes}); give another --run or delete the folder"
        )
    if held_out and photos not in (None, photos_digest(held_out)):
        raise UsageError(
            f"{folder} holds a run that is validated on other photos, some of which would be trained on now: "
            "give the photos as they were, or another --run"
        )


def _refuse_files(folder: Path) -> None:
    """Refuse a folder with files that no training run wrote, except hidden files and our own logs."""
    found = sorted(file.name for file in folder.iterdir() if file.name[0] != "." and not is_ours(file))
    if found:
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UsageError(
            f"{folder} holds {found[0]}{others}, but no training run; give another folder with --run"
        )


def differences(before: Any, after: Any, key: str = "") -> list[str]:
    """The differences of two nested dictionaries, as `key before → after`."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [] if before == after else [f"{key} {before} → {after}"]
    names = dict.fromkeys([*before, *after])
    return [
        change
        for name in names
        for change in differences(before.get(name), after.get(name), f"{key}.{name}" if key else name)
    ]
