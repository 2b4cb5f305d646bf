"""Presets of other packages: entry points of the group `matcher.presets`.

A package adds a preset by a function that takes the options of `matcher.load` that it knows and returns a
`Pipeline`, and by naming it in its pyproject.toml:

    [project.entry-points."matcher.presets"]
    corners = "my_package:corners"

Names are known without importing anything; a package is imported when its preset is used. A package that is
broken is an error for its own presets only.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from matcher.errors import UsageError

GROUP = "matcher.presets"


def plugin_names() -> list[str]:
    """Sorted names of the presets that installed packages add."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def find_plugin(name: str) -> EntryPoint | None:
    """The entry point of a preset, not imported yet; None where no package adds it.

    Raises:
        UsageError: two packages add a preset of that name.
    """
    found = list(entry_points(group=GROUP, name=name))
    packages = sorted({package_of(point) for point in found})
    if len(packages) > 1:
        raise UsageError(f"the preset {name!r} is added by {' and '.join(packages)}; remove one of them")
    return found[0] if found else None


def package_of(point: EntryPoint) -> str:
    """Name and version of the package that adds a preset."""
    return "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def load_plugin(point: EntryPoint) -> Callable[..., Any]:
    """The function that builds the pipeline.

    Raises:
        UsageError: the package cannot be imported, or what it names is no function.
    """
    try:
        build = point.load()
    except Exception as error:  # whatever its import runs into is that package's fault
        raise UsageError(
            f"the preset {point.name!r} of {package_of(point)} cannot be loaded "
            f"({type(error).__name__}: {error}); update or remove that package"
        ) from error
    if not callable(build):
        raise UsageError(f"the preset {point.name!r} of {package_of(point)} is not a function: {point.value}")
    return build
