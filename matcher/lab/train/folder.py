"""The folder of a run, which belongs to one recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matcher.config_tables import to_dict
from matcher.errors import IntegrityError, UsageError
from matcher.files import is_ours, write_whole
from matcher.lab.train.recipe import Recipe, fingerprint


def claim_folder(folder: Path, recipe: Recipe) -> None:
    """Make the folder of a run, or check that it belongs to this recipe.

    Raises:
        UsageError: it is another recipe's, it holds files but no run, or it cannot be made.
        IntegrityError: its recipe.json is damaged or was changed.
    """
    note = folder / "recipe.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            _refuse_files(folder)
            values = {"fingerprint": fingerprint(recipe), "recipe": to_dict(recipe)}
            write_whole(note, json.dumps(values, indent=1).encode())
            return
        stored = json.loads(note.read_text(encoding="utf-8"))
        owner, values = stored["fingerprint"], stored["recipe"]
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
