"""matcher/README.md is true: its tree is the tree, and its recipes work as they stand."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_rules import LAYERS, ROOT, read_tree

MAP = (ROOT / "matcher" / "README.md").read_text("utf-8")
BLOCK = re.compile(r"^```(\S+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RECIPES = re.findall(r"^### (Add [^\n]+)\n(.*?)(?=^### |\Z)", MAP, re.MULTILINE | re.DOTALL)


def test_the_tree_of_the_map_is_the_tree():
    package = ROOT / "matcher"
    folders = {path.parent for path in package.rglob("*.py")} - {package}
    real = {f"{folder.relative_to(package).as_posix()}/" for folder in folders}
    real |= {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert [path for path, _ in read_tree()] == list(dict.fromkeys(path for path, _ in read_tree()))
    assert {path for path, _ in read_tree()} == real
    assert all(len(text) > 10 for _, text in read_tree())


def test_layers_are_in_order_and_complete():
    assert list(LAYERS.values()) == sorted(LAYERS.values())
    assert LAYERS["errors"] < LAYERS["data"] < LAYERS["match"] < LAYERS["pipeline"] < LAYERS["cli"]


def test_the_map_has_the_recipes():
    assert [title for title, _ in RECIPES] == [
        "Add a front end",
        "Add a matcher",
        "Add an exporter",
        "Add a benchmark set",
    ]


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of what the recipes change and use."""
    for name in ("matcher", "weights", "assets"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def change(file: Path, text: str) -> None:
    """Put the lines with + in place of those with -, which are in the file once."""
    old, new = ("".join(f"{line[1:]}\n" for line in text.splitlines() if line[:1] == sign) for sign in "-+")
    content = file.read_text("utf-8")
    assert content.count(old) == 1, f"{file.name} does not hold this once:\n{old}"
    file.write_text(content.replace(old, new), "utf-8")


@pytest.mark.parametrize(("title", "text"), RECIPES, ids=[title for title, _ in RECIPES])
def test_a_recipe_works_as_it_stands(title, text, checkout):
    (checkout / "bin").mkdir()
    command = checkout / "bin" / "matcher"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m matcher "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    ran = 0
    for kind, argument, body in BLOCK.findall(text):
        if argument.startswith("new="):
            file = checkout / argument.removeprefix("new=")
            assert not file.exists()
            file.write_text(body, "utf-8")
        elif kind == "diff":
            change(checkout / argument, body)
        else:
            arguments = [sys.executable, "-c", body] if kind == "python" else ["sh", "-e", "-c", body]
            done = subprocess.run(arguments, cwd=checkout, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            ran += 1
    assert ran
