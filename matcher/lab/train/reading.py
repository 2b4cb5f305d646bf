"""Recipes from TOML files, checked."""

from __future__ import annotations

import tomllib
from pathlib import Path

from matcher.config_tables import from_dict
from matcher.errors import UsageError
from matcher.files import open_given
from matcher.lab.train.keypoints.recipe import FrontEndRecipe
from matcher.lab.train.recipe import Recipe
from matcher.match.network.validate import check_config
from matcher.weights.manifest import FOLDERS
from matcher.weights.renames import current_config

_LARGEST = 32 * 1024  # bytes


def read_recipe(path: Path) -> Recipe | FrontEndRecipe:
    """A recipe from TOML: of the front end if it has `trains = "front end"`, else of a matcher.

    Raises:
        UsageError: unreadable, not TOML, an unknown key, a wrong type or an impossible value; the message
            names the key.
    """
    try:
        with open_given(path) as file:
            data = file.read(_LARGEST + 1)
        # The time that TOML takes grows with the square of its length.
        if len(data) > _LARGEST:
            raise UsageError(
                f"{path}: a recipe has a few kilobytes, and this file more than {_LARGEST // 1024}"
            )
        values = tomllib.loads(data.decode("utf-8"))
        if "network" in values and "trains" not in values:
            values["network"] = current_config(values["network"])
        recipe = from_dict(FrontEndRecipe if "trains" in values else Recipe, values, where=path.name)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"{path}: cannot read the recipe ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not a TOML file ({error})") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    check_recipe(recipe, path.name)
    return recipe


def shipped_recipe(name: str) -> Path:
    """The recipe of shipped weights, beside them.

    Raises:
        UsageError: there is none of that name.
    """
    for folder in FOLDERS:
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    raise UsageError(f"{FOLDERS[-1] / f'{name}.toml'} is absent; give a recipe with --recipe FILE.toml")


def check_recipe(recipe: Recipe | FrontEndRecipe, where: str = "recipe") -> None:
    """Refuse values of the right type that cannot be trained with.

    Raises:
        UsageError: names the first such key and what it must be.
    """
    for kept, rule in recipe.rules():
        if not kept:
            raise UsageError(f"{where}: {rule}")
    if isinstance(recipe, Recipe):
        try:
            check_config(recipe.network)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
