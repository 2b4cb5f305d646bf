"""What the project is called where it is installed, and how its tests are started."""

import re
import tomllib
from pathlib import Path

import pytest

from matcher.errors import install_command

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("*.py", "*.md", "*.toml", "*.txt", "*.js", "*.html")
# `matcher` on the package index is somebody else's project.
FOREIGN = re.compile(
    r"(pip3?|uv|pipx|uvx|poetry)\s+(install|add|run)\b[^\n`]*?[ \t'\"=]matcher(?=[\s'\"\[`,;)]|$)"
)


def texts() -> list[Path]:
    folders = [ROOT / name for name in ("matcher", "scripts", "tests", "weights", "docs", ".ci")]
    found = [path for folder in folders for kind in TEXTS for path in folder.rglob(kind)]
    return [*found, *(path for kind in TEXTS for path in ROOT.glob(kind))]


def test_no_text_advises_to_install_the_foreign_project():
    assert len(texts()) > 200
    advice = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in texts()
        if path != Path(__file__)
        for match in FOREIGN.finditer(path.read_text("utf-8"))
    ]
    assert advice == []


@pytest.mark.parametrize(
    "text",
    ["pip install matcher", "pip install 'matcher[app]'", 'uv add "matcher"', "pip install -U matcher[sfm]"],
)
def test_advice_of_the_foreign_project_is_seen(text):
    assert FOREIGN.search(text)


def test_our_own_name_is_not_taken_for_it():
    assert not FOREIGN.search(install_command("app"))
    assert not FOREIGN.search("pip install ./matcher-1.0.0-py3-none-any.whl")


def test_hints_name_what_is_missing_in_the_range_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["name"] != "matcher"
    assert project["scripts"] == {"matcher": "matcher.cli:main"}
    stated = {*project["dependencies"], *(r for e in project["optional-dependencies"].values() for r in e)}
    named = {
        name
        for path in (ROOT / "matcher").rglob("*.py")
        for call in re.findall(r"install_command\(((?:['\"][\w-]+['\"],? ?)+)\)", path.read_text("utf-8"))
        for name in re.findall(r"[\w-]+", call)
    }
    assert {"pycolmap", "onnxruntime", "gradio", "pillow-heif"} <= named
    for name in named:
        assert install_command(name).removeprefix("pip install ").strip("'") in stated, name


@pytest.mark.parametrize(
    ("arguments", "cores", "expected"),
    [
        ([], 2, ["-n", "2", "--dist", "loadfile"]),
        (["tests/test_cli.py", "-k", "help"], 4, ["-n", "4", "--dist", "loadfile"]),
        ([], 1, []),
        (["-n3"], 8, []),
        (["--pdb"], 8, []),
    ],
)
def test_tests_run_on_all_cores_unless_told_otherwise(arguments, cores, expected, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from run_tests import parallel

    assert parallel(arguments, cores) == expected
