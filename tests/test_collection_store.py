"""The store of a run: what is written comes back, and what is damaged is said."""

from dataclasses import replace

import numpy as np
import pytest
from random_collection import SETTINGS, features, fill, pair, put_features

from matcher.cameras import Camera
from matcher.collection import schema
from matcher.collection.schema import Counts, decode_pair, encode_pair
from matcher.collection.store import Store, Writer
from matcher.errors import IntegrityError, UsageError


@pytest.mark.parametrize(
    ("count0", "refined", "matches"), [(400, False, 0), (400, False, 299), (70_000, True, 299)]
)
def test_a_pair_survives_its_bytes(rng, count0, refined, matches):
    points0 = rng.uniform(0, 6000, (count0, 2)).astype(np.float32)
    points1 = rng.uniform(0, 6000, (300, 2)).astype(np.float32)
    wanted = pair(rng, "a", "b", points0, points1, matches)
    moved = wanted.matches.points1 + refined * (rng.random((matches, 1)) < 0.5).astype(np.float32)
    wanted = replace(wanted, matches=replace(wanted.matches, points1=moved))
    pose = np.vstack([rng.normal(size=(3, 4)), [0, 0, 0, 1]])
    geometry = replace(wanted.geometry, kind="essential", cam1_from_cam0=pose)
    data = encode_pair(wanted.matches, geometry, points0, points1)
    assert refined or len(data) < 3000
    found, read = decode_pair(data, points0, points1)
    for name in ("indices", "points0", "points1", "layers_run", "kept0", "kept1"):
        assert np.array_equal(getattr(found, name), getattr(wanted.matches, name)), name
    assert np.allclose(found.scores, wanted.matches.scores, atol=0.5001 / 65535)
    for name in ("inliers", "matrix", "cam1_from_cam0", "status"):
        assert np.array_equal(getattr(read, name), getattr(geometry, name)), name
    with pytest.raises(IntegrityError):
        decode_pair(data[:-1], points0, points1)


def test_a_store_gives_back_what_was_written(rng, tmp_path):
    written = fill(tmp_path / "run", rng)
    distorted = Camera(500, 500, 320.5, 240, (640, 480), "SIMPLE_RADIAL", (0.1,))
    with Writer(tmp_path / "run") as writer:
        with writer.transaction():
            writer.put_camera("im 002.jpg", distorted)
        with pytest.raises(ZeroDivisionError), writer.transaction():
            put_features(writer, "lost.jpg", features(rng))
            raise ZeroDivisionError
    with Store.open(tmp_path / "run") as store:
        assert store.settings == SETTINGS and store.image_folder == tmp_path / "photos"
        assert store.counts() == Counts(4, 0, 0, 6, 0, 0)
        images = store.images()
        assert [image.name for image in images] == [f"im {n:03d}.jpg" for n in range(4)]
        assert (images[0].size, images[0].count, images[0].status) == ((640, 480), 400, "done")
        assert images[0].path == tmp_path / "photos" / "im 000.jpg"
        assert (images[0].camera, images[2].camera) == (None, distorted)
        for found, wanted in zip(store.pairs(), written, strict=True):
            assert (found.name0, found.name1) == (wanted.name0, wanted.name1)
            assert np.array_equal(found.matches.indices, wanted.matches.indices)
        kept = store.features("im 001.jpg")
        assert np.array_equal(kept.keypoints, store.keypoints("im 001.jpg"))
        assert (kept.kind, int(kept.exif_orientation)) == ("sift", 6)
        assert store.check() == []
        with pytest.raises(UsageError, match="absent"):
            store.keypoints("absent.jpg")


def test_damage_and_other_versions_are_said(rng, tmp_path):
    fill(tmp_path, rng)
    path = tmp_path / schema.DATABASE
    whole = path.read_bytes()
    with Store.open(tmp_path) as store:
        ((blob,),) = store.rows("SELECT data FROM pairs WHERE id = 3")
    place = whole.find(blob[-300:-240])
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
    with Store.open(tmp_path) as store:
        with pytest.raises(IntegrityError, match=r"im 000.jpg and im 003.jpg"):
            list(store.pairs())
        assert len(store.check()) == 1
    for damaged in (b"no database at all" * 99, whole[: len(whole) // 3], b"", b"\0" * len(whole)):
        path.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=r"run\.db"):
            Store.open(tmp_path)
    path.write_bytes(whole[:60] + (99).to_bytes(4, "big") + whole[64:])  # SQLite's user_version
    for opened in (Store.open, Writer):
        with pytest.raises(IntegrityError, match="newer"):
            opened(tmp_path)
