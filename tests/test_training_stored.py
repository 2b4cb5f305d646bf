"""Sets of views on disk, and mixtures of sources."""

import os
from pathlib import Path

import numpy as np
import pytest
from training_data import write_photos, write_views

from matcher.errors import IntegrityError, UsageError
from matcher.evaluate.folders import Mixture, Planes, build_mixture
from matcher.evaluate.posed import HIDDEN, UNKNOWN, StoredViews, dense_positions, find_sets, read_view
from matcher.evaluate.protocols import PhotoSet
from matcher.train.labelling import match_errors, sift_features

DATA = Path(os.environ.get("MATCHER_DATA", "../shared")) / "multiview" / "val" / "bookstore_rendered"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Two sets of three views of walls; depth of every second pixel, with a hole in it."""
    root = tmp_path_factory.mktemp("views")
    for place in range(2):
        write_views(root / f"place_{place}", place)
    return root


def test_positions_between_stored_views_are_exact_and_unknown_depth_stays_unknown(root):
    stored = find_sets(root)[0]
    assert len(stored.pairs) == 3 and stored.scene == "place"
    view0, view1 = (read_view(stored, number).grey() for number in (0, 1))
    positions = dense_positions(view0, view1)
    assert positions[:, 100, 200] == pytest.approx([200 - 300 * 0.3 / 3, 100], abs=0.02)
    assert positions[0, 5, 200] == UNKNOWN
    assert positions[0, 100, 5] == HIDDEN


def test_pairs_have_the_size_asked_for_and_are_the_same_for_the_same_random_state(root):
    source = StoredViews(root)
    first, again = (source.pair(np.random.default_rng(3), (256, 192)) for _ in range(2))
    assert first.pixels0.shape == (192, 256) and first.positions1.shape == (2, 192, 256)
    assert np.array_equal(first.pixels0, again.pixels0)
    assert np.array_equal(first.positions0, again.positions0)
    assert first.scenes == {"place"}


def test_damaged_sets_and_folders_without_views_are_errors(root, tmp_path):
    with pytest.raises(UsageError, match="no views"):
        StoredViews(tmp_path)
    (tmp_path / "cameras.json").write_text("{", encoding="utf-8")
    with pytest.raises(IntegrityError, match="damaged"):
        StoredViews(tmp_path)


def test_a_mixture_draws_its_sources_by_their_shares(root, tmp_path):
    photos = PhotoSet(sorted(write_photos(tmp_path, 4).iterdir()), colour=True)
    mixture = build_mixture(photos, {"planes": 1, "rendered": 3}, rendered=root)
    rng = np.random.default_rng(0)
    drawn = [mixture.pair(rng, (128, 96)).source for _ in range(40)]
    assert set(drawn) == {"planes", "rendered"}
    assert 20 < drawn.count("rendered") < 38
    with pytest.raises(UsageError, match=r"sources\.real"):
        build_mixture(photos, {"planes": 1, "real": 1})
    with pytest.raises(UsageError, match="at least one share"):
        Mixture({"planes": Planes(photos)}, {"planes": 0})


@pytest.mark.skipif(not DATA.is_dir(), reason="no rendered views here")
def test_rendered_views_agree_with_independent_matches():
    (stored,) = find_sets(DATA)
    views = {number: read_view(stored, number).grey() for number in set(stored.pairs[:30].ravel().tolist())}
    described = {number: sift_features(view.pixels) for number, view in views.items()}
    errors = [
        match_errors(described[i], described[j], dense_positions(views[i], views[j]))
        for i, j in stored.pairs[:30].tolist()
    ]
    errors = np.concatenate(errors)
    near = errors[errors < 12]
    assert len(near) > 200
    assert np.median(near) < 1.0
