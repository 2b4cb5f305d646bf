"""Images are read while others are worked on, and extracted in batches: the same results."""

import pytest
from collection_runs import contents, photos

from matcher.collection.collection import Collection
from matcher.collection.runner import extract_jobs
from matcher.collection.workers import Workers


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
