"""The tutorials run from top to bottom, four of them as notebooks, and their pictures are there."""

import importlib.util
import os
import re
import shutil
from pathlib import Path

import pytest
from tutorials import PAGES, ROOT, blocks, cells, environment, prepare, run_page

NEEDS_PYCOLMAP = {"splat", "where"}


def notebook(page: Path) -> Path:
    return ROOT / "docs" / "notebooks" / f"{page.stem}.ipynb"


def runs_as_notebook(page: Path) -> bool:
    return notebook(page).is_file() and all(map(importlib.util.find_spec, ("nbclient", "ipykernel")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs_from_top_to_bottom(page, tmp_path, shipped_weights, monkeypatch):
    if page.stem in NEEDS_PYCOLMAP:
        pytest.importorskip("pycolmap")
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    assert len(blocks(page)) >= 2
    if not runs_as_notebook(page):
        run_page(page, tmp_path / "work")
        return
    import nbformat
    from nbclient import NotebookClient

    for name, value in environment().items():
        monkeypatch.setitem(os.environ, name, value)
    found = nbformat.read(notebook(page), as_version=4)
    resources = {"metadata": {"path": str(prepare(tmp_path / "work"))}}
    NotebookClient(found, timeout=900, resources=resources).execute()  # raises if a cell does


@pytest.mark.parametrize(
    "page", [page for page in PAGES if notebook(page).is_file()], ids=lambda page: page.stem
)
def test_a_notebook_has_the_code_of_its_tutorial(page):
    nbformat = pytest.importorskip("nbformat")
    stored = nbformat.read(notebook(page), as_version=4)
    code = [
        [cell.source for cell in each if cell.cell_type == "code"]
        for each in (stored.cells, cells(page).cells)
    ]
    assert code[0] == code[1]
    assert notebook(page).stat().st_size < 60_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_pictures_are_small_and_there(page):
    for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text("utf-8")):
        picture = (page.parent / name).resolve()
        assert picture.is_relative_to(ROOT / "docs" / "pictures")
        assert picture.stat().st_size < 200_000
