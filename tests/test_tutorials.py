"""The tutorials run from top to bottom, and their pictures are there."""

import re
import shutil

import pytest
from tutorials import PAGES, ROOT, blocks, run_page

NEEDS_PYCOLMAP = {"splat", "where"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs_from_top_to_bottom(page, tmp_path, shipped_weights):
    if page.stem in NEEDS_PYCOLMAP:
        pytest.importorskip("pycolmap")
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    assert len(blocks(page)) >= 2
    run_page(page, tmp_path / "work")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_pictures_are_small_and_there(page):
    for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text("utf-8")):
        picture = (page.parent / name).resolve()
        assert picture.is_relative_to(ROOT / "docs" / "pictures")
        assert picture.stat().st_size < 400_000
