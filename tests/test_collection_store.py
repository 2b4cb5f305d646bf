import sqlite3
import time
from dataclasses import replace

import numpy as np
import pytest
from random_collection import SETTINGS, features, fill, pair, put_features

from matcher.cameras import Camera
from matcher.collection import schema
from matcher.collection.schema import Counts, DamagedError, checksum, decode_pair, encode_pair
from matcher.collection.store import EncodedPair, Store, Writer, decode_features, encode_features, file_path
from matcher.errors import IntegrityError, UsageError


def same_pair(found, wanted) -> bool:
    arrays = [
        (found.matches.indices, wanted.matches.indices),
        (found.matches.points0, wanted.matches.points0),
        (found.matches.points1, wanted.matches.points1),
        (found.geometry.inliers, wanted.geometry.inliers),
        (found.geometry.matrix, wanted.geometry.matrix),
    ]
    return (
        all(np.array_equal(a, b) for a, b in arrays)
        and np.abs(found.matches.scores - wanted.matches.scores).max() <= 0.5001 / 65535
        and (found.name0, found.name1) == (wanted.name0, wanted.name1)
        and found.geometry.status == wanted.geometry.status
        and found.matches.layers_run == wanted.matches.layers_run
        and (found.matches.kept0, found.matches.kept1) == (wanted.matches.kept0, wanted.matches.kept1)
    )


@pytest.mark.parametrize("count0", [400, 70_000])
@pytest.mark.parametrize("refined", [False, True])
@pytest.mark.parametrize("matches", [0, 1, 299])
def test_a_pair_survives_its_bytes(rng, count0, refined, matches):
    points0 = rng.uniform(0, 6000, (count0, 2)).astype(np.float32)
    points1 = rng.uniform(0, 6000, (300, 2)).astype(np.float32)
    wanted = pair(rng, "a", "b", points0, points1, matches)
    if refined:
        moved = wanted.matches.points1 + (rng.random((matches, 1)) < 0.5).astype(np.float32)
        wanted = replace(wanted, matches=replace(wanted.matches, points1=moved))
    pose = np.vstack([rng.normal(size=(3, 4)), [0, 0, 0, 1]])
    geometry = replace(wanted.geometry, kind="essential", cam1_from_cam0=pose)
    data = encode_pair(wanted.matches, geometry, points0, points1)
    found, read = decode_pair(data, points0, points1)
    assert np.array_equal(found.indices, wanted.matches.indices)
    assert np.array_equal(found.points0, wanted.matches.points0)
    assert np.array_equal(found.points1, wanted.matches.points1)
    assert np.allclose(found.scores, wanted.matches.scores, atol=0.5001 / 65535)
    assert np.array_equal(read.inliers, geometry.inliers)
    assert np.array_equal(read.cam1_from_cam0, pose)
    for cut in (3, len(data) - 1):
        with pytest.raises(DamagedError):
            decode_pair(data[:cut], points0, points1)


@pytest.mark.parametrize(
    ("kind", "dim", "per_number"), [("sift", 128, 1), ("superpoint", 256, 2), ("any", 64, 2)]
)
def test_descriptors_take_the_bits_that_their_kind_needs(rng, kind, dim, per_number):
    wanted = features(rng, 500, kind, dim)
    facts = {"size": (640, 480), "exif_orientation": 6, "kind": kind, "scale": (0.5, 0.4)}
    record = encode_features(wanted)
    assert len(record) < 500 * dim * per_number + 500 * 12 + 600
    found = decode_features(record, wanted.keypoints.numpy(), **facts)
    error = (found.descriptors - wanted.descriptors).abs() / wanted.descriptors.abs().clamp(min=1e-3)
    assert float(error.max()) <= (0 if kind == "sift" else 2**-11)
    for name in ("keypoints", "scores", "scales", "orientations", "size", "exif_orientation"):
        assert (getattr(found, name) == getattr(wanted, name)).all(), name
    with pytest.raises(DamagedError):
        decode_features(record[:-1], wanted.keypoints.numpy(), **facts)
    with pytest.raises(DamagedError):
        decode_features(record, wanted.keypoints.numpy()[1:], **facts)


def test_a_store_gives_back_what_was_written(rng, tmp_path):
    written = fill(tmp_path / "run", rng)
    with Store.open(tmp_path / "run") as store:
        assert store.settings == SETTINGS
        assert store.image_folder == tmp_path / "photos"
        assert store.counts() == Counts(4, 0, 0, 6, 0, 0)
        images = store.images()
        assert [image.name for image in images] == [f"im {n:03d}.jpg" for n in range(4)]
        assert (images[0].size, images[0].count, images[0].status) == ((640, 480), 400, "done")
        assert images[0].path == tmp_path / "photos" / "im 000.jpg"
        pairs = list(store.pairs())
        assert all(same_pair(a, b) for a, b in zip(pairs, written, strict=True))
        kept = store.features("im 001.jpg")
        assert kept.keypoints.numpy() == pytest.approx(store.keypoints("im 001.jpg"))
        assert (kept.kind, int(kept.exif_orientation)) == ("sift", 6)
        assert store.check() == []
        with pytest.raises(UsageError, match="absent"):
            store.keypoints("absent.jpg")


def test_descriptor_files_have_a_limit_and_forget_what_was_not_committed(rng, tmp_path):
    Store.create(tmp_path, SETTINGS).close()
    with Writer(tmp_path, max_file_bytes=100_000) as writer:
        for number in range(5):
            with writer.transaction():
                put_features(writer, f"{number}", features(rng))
        kept = writer.store.features("4").descriptors
        with pytest.raises(ZeroDivisionError), writer.transaction():
            put_features(writer, "lost", features(rng))
            raise ZeroDivisionError
    sizes = [file_path(tmp_path, number).stat().st_size for number in range(3)]
    assert sizes[0] < 200_000
    with Writer(tmp_path, max_file_bytes=100_000) as writer, writer.transaction():
        assert [image.name for image in writer.store.images()] == ["0", "1", "2", "3", "4"]
        put_features(writer, "new", features(rng))
    with Store.open(tmp_path) as store:
        assert (store.features("4").descriptors == kept).all()
        assert store.check() == []


def test_cameras_are_kept(rng, tmp_path):
    distorted = Camera(500, 500, 320.5, 240, (640, 480), "SIMPLE_RADIAL", (0.1,))
    fill(tmp_path, rng)
    with Writer(tmp_path) as writer, writer.transaction():
        writer.put_camera("im 001.jpg", Camera(500.0, 501.0, 320.5, 240.0))
        writer.put_camera("im 002.jpg", distorted)
    with Store.open(tmp_path) as store:
        assert store.image("im 001.jpg").camera == Camera(500.0, 501.0, 320.5, 240.0)
        assert store.image("im 002.jpg").camera == distorted
        assert store.image("im 000.jpg").camera is None


def test_damage_and_other_versions_are_said(rng, tmp_path):
    fill(tmp_path, rng, matches=300)
    path = tmp_path / schema.DATABASE
    whole = path.read_bytes()
    connection = sqlite3.connect(path)
    blob = connection.execute("SELECT data FROM pairs WHERE id = 3").fetchone()[0]
    connection.close()
    place = whole.find(blob[-300:-240])
    assert place > 0
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
    with Store.open(tmp_path) as store:
        with pytest.raises(IntegrityError, match=r"the pair im 000.jpg and im 003.jpg is damaged"):
            list(store.pairs())
        assert store.check() == ["pair 3 is damaged (its checksum differs)"]
    for damaged in (b"no database at all" * 99, whole[: len(whole) // 3], b"", b"\0" * len(whole)):
        path.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=r"run\.db"), Store.open(tmp_path) as store:
            list(store.pairs())
            raise AssertionError(store.check())
    path.write_bytes(whole)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(IntegrityError, match="newer matcher"):
        Store.open(tmp_path)
    with pytest.raises(IntegrityError, match="newer matcher"):
        Writer(tmp_path)


def test_overhead_in_bytes_and_time(rng, tmp_path):
    """At 300 matches a pair: at most 3 kB, and thousands of pairs a second written and read."""
    fill(tmp_path, rng, images=2)
    with Writer(tmp_path) as writer:
        template = next(writer.store.pairs())
        points = [writer.store.keypoints(f"im {n:03d}.jpg") for n in range(2)]
        with writer.transaction():
            for number in range(120):
                found = replace(features(rng, 400, "any", 1), keypoints=points[number % 2])
                put_features(writer, f"{number:04d}", found)
        before = (tmp_path / schema.DATABASE).stat().st_size
        ends = [(i, j) for i in range(3, 123, 2) for j in range(4, 123, 2)]
        start = time.process_time()
        with writer.transaction():
            encoded = (encode_pair(template.matches, template.geometry, *points) for _ in ends)
            writer.put_pairs(EncodedPair(*e, 0.1, checksum(d), d) for e, d in zip(ends, encoded, strict=True))
        written = len(ends) / (time.process_time() - start)
    size = ((tmp_path / schema.DATABASE).stat().st_size - before) / len(ends)
    with Store.open(tmp_path) as store:
        start = time.process_time()
        assert sum(len(p.matches) for p in store.pairs()) == 300 * (len(ends) + 1)
        read = len(ends) / (time.process_time() - start)
    print(f"{size:.0f} bytes a pair, {written:.0f} pairs/s written, {read:.0f} read")
    assert size <= 3000 and min(written, read) >= 2000  # of processor time
