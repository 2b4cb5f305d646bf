"""Images are read while others are worked on, and extracted in batches: the same results."""

from threading import Event

import pytest
from collection_runs import contents, photos

from matcher.collection.collection import Collection
from matcher.collection.runner import extract_jobs
from matcher.collection.workers import Workers, read_ahead

NAMES = ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_everything_is_read_in_order(ahead: int) -> None:
    read = []

    def one(name: str) -> str:
        read.append(name)
        return name.upper()

    assert [(name, result()) for name, result in read_ahead(one, NAMES, ahead)] == [
        (name, name.upper()) for name in NAMES
    ]
    assert read == NAMES
    assert list(read_ahead(one, [], ahead)) == []


def test_the_next_one_is_read_while_the_caller_works() -> None:
    started = {name: Event() for name in NAMES}
    for name, result in read_ahead(lambda name: started[name].set(), NAMES, 1):
        result()
        if name != NAMES[-1]:
            assert started[NAMES[NAMES.index(name) + 1]].wait(5)
        assert not any(started[later].is_set() for later in NAMES[NAMES.index(name) + 2 :])


def test_what_cannot_be_read_is_an_error_where_it_is_asked_for() -> None:
    def one(name: str) -> str:
        if name == "b":
            raise ValueError(name)
        return name

    results = dict(read_ahead(one, NAMES, 1))
    with pytest.raises(ValueError, match="b"):
        results.pop("b")()
    assert [result() for result in results.values()] == ["a", "c", "d", "e"]


def test_no_more_is_read_for_a_caller_that_stops() -> None:
    read = []
    images = read_ahead(read.append, NAMES, 1)
    next(images)
    images.close()
    assert len(read) <= 2


@pytest.mark.parametrize("preset", ["nearest", "nearest-learned"])
def test_batches_of_images_give_the_same_run(tmp_path, preset: str) -> None:
    """Images of a usual size: of tiny ones the convolutions of some processors depend on the batch."""
    photos(tmp_path / "photos", 5, (320, 240))
    (tmp_path / "photos" / "view 01a.png").write_bytes(b"no image")
    runs = []
    for batch in (1, 4):
        run = tmp_path / str(batch)
        options = {"preset": preset, "max_keypoints": 150, "device": "cpu"}
        found = Collection.open(run, workers=Workers(count=0, batch=batch), **options)
        found.add_images(tmp_path / "photos")
        found.add_pairs(exhaustive=True)
        report = found.run()
        assert report.extracted == 6
        assert (report.counts.images_done, report.counts.images_failed) == (5, 1)
        runs.append(contents(run))
    assert runs[0] == runs[1]


def test_jobs_are_whole_batches() -> None:
    names = [f"{number}.jpg" for number in range(100)]
    jobs = list(extract_jobs(names, 8))
    assert [name for job in jobs for name in job.items] == names
    assert [len(job.items) for job in jobs] == [8] * 12 + [4]
    assert {job.batch for job in jobs} == {8}
