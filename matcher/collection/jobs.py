"""The work on one image or pair, in this process, a worker process or a Ray actor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

import numpy as np

from matcher.collection.descriptors import encode_features
from matcher.collection.encoding import checksum, encode_pair
from matcher.collection.reading import read_ahead
from matcher.collection.settings import Setup, build
from matcher.collection.sources import Extracted
from matcher.collection.writer import EncodedPair
from matcher.data.camera import Camera
from matcher.data.features import Features
from matcher.data.image import Image
from matcher.data.matches import Matches
from matcher.data.tensors import to_numpy
from matcher.errors import IntegrityError, MatcherError
from matcher.pipeline import Pipeline
from matcher.verify.verdict import NOT, reject_improbable

_CACHE_BYTES = 512 << 20  # of features held


@dataclass(frozen=True)
class ImageEntry:
    """One side of a pair."""

    number: int  # in the store
    name: str
    camera: Camera | None


class ExtractedImage(NamedTuple):
    """A worker's result for an image: features ready to be stored, or why there are none."""

    name: str
    found: Extracted | None  # without descriptors, which are in the record
    record: bytes = b""
    reason: str = ""


class PairFailure(NamedTuple):
    """A worker's result for a pair that could not be matched."""

    image0: int
    image1: int
    reason: str


@dataclass(frozen=True)
class ExtractJob:
    """Images to extract."""

    items: tuple[str, ...]
    batch: int = 1  # items that are worked on together

    def failure(self, item: str, reason: str) -> ExtractedImage:
        """The result for an item whose worker died."""
        return ExtractedImage(item, None, reason=reason)


@dataclass(frozen=True)
class MatchJob:
    """Pairs to match, by the numbers of their images."""

    items: tuple[tuple[int, int], ...]
    images: Mapping[int, ImageEntry]
    batch: int = 1

    def failure(self, item: tuple[int, int], reason: str) -> PairFailure:
        """The result for an item whose worker died."""
        return PairFailure(*item, reason)


Job = ExtractJob | MatchJob
Outcome = ExtractedImage | EncodedPair | PairFailure
_Read = tuple[str, Callable[[], Extracted]]  # an image's name, and what waits until it was read


class JobRunner:
    """A pipeline with a cache of features."""

    def __init__(self, setup: Setup, features_of: Callable[[ImageEntry], Features]) -> None:
        """Load the pipeline; `features_of` fetches an image's features. Errors are those of `build`."""
        self.pipeline: Pipeline = build(setup)
        self._source, self._camera, self._fetch = setup.source, setup.camera, features_of
        self._cache: OrderedDict[int, Features] = OrderedDict()
        self._cached = 0

    def run(self, job: Job) -> Iterator[Outcome]:
        """One result per item, in order.

        Raises:
            IntegrityError: the store is damaged, or weights are absent.
        """
        if isinstance(job, ExtractJob):
            yield from self._extract_in_turn(job)
        else:
            for start in range(0, len(job.items), job.batch):
                batch = job.items[start : start + job.batch]
                yield from self.match([(job.images[a], job.images[b]) for a, b in batch])

    def _extract_in_turn(self, job: ExtractJob) -> Iterator[ExtractedImage]:
        """Features of the images; a thread reads those that follow while the front end works."""
        batch: list[_Read] = []
        with closing(read_ahead(self._read, job.items, job.batch)) as images:
            for one in images:
                batch.append(one)
                if len(batch) == job.batch:
                    yield from self.extract(batch)
                    batch = []
            if batch:
                yield from self.extract(batch)

    def _read(self, name: str) -> Extracted:
        return self._source.read(name, self.pipeline)

    def extract(self, batch: Sequence[_Read]) -> list[ExtractedImage]:
        """Features of images in one batch; where it does not fit or one fails, in halves."""
        try:
            given = [result() for _, result in batch]
            images = [one.features for one in given if isinstance(one.features, Image)]
            found = iter(self.pipeline.features_of(images) if images else ())
            done = [
                replace(one, features=next(found)) if isinstance(one.features, Image) else one
                for one in given
            ]
            return [_encoded(name, one) for (name, _), one in zip(batch, done, strict=True)]
        except IntegrityError:
            raise
        except Exception as error:  # one image fails, the others continue
            if len(batch) > 1:
                middle = len(batch) // 2
                return [*self.extract(batch[:middle]), *self.extract(batch[middle:])]
            return [ExtractedImage(batch[0][0], None, reason=reason_of(error))]

    def match(self, pairs: Sequence[tuple[ImageEntry, ImageEntry]]) -> list[EncodedPair | PairFailure]:
        """Match and verify pairs in one batch; where it does not fit or fails, in halves."""
        start = perf_counter()
        try:
            sides = [(self._features(a), self._features(b)) for a, b in pairs]
            found = self.pipeline.match_features_batch(sides)
        except IntegrityError:
            raise
        except Exception as error:
            if len(pairs) > 1:
                middle = len(pairs) // 2
                return [*self.match(pairs[:middle]), *self.match(pairs[middle:])]
            return [PairFailure(pairs[0][0].number, pairs[0][1].number, reason_of(error))]
        each = (perf_counter() - start) / len(pairs)
        return [
            self._verify(*pair, *features, matches, each)
            for pair, features, matches in zip(pairs, sides, found, strict=True)
        ]

    def _verify(
        self,
        side0: ImageEntry,
        side1: ImageEntry,
        f0: Features,
        f1: Features,
        matches: Matches,
        seconds: float,
    ) -> EncodedPair | PairFailure:
        start = perf_counter()
        try:
            camera0, camera1 = self._cameras(side0, side1)
            geometry = self.pipeline.verify(f0, f1, matches, camera0=camera0, camera1=camera1)
            # A false edge does more harm to a reconstruction than an absent one.
            geometry = reject_improbable(geometry, matches, f0.image_size, f1.image_size, least=NOT)
            data = encode_pair(matches, geometry, to_numpy(f0.keypoints), to_numpy(f1.keypoints))
        except Exception as error:
            return PairFailure(side0.number, side1.number, reason_of(error))
        seconds += perf_counter() - start
        return EncodedPair(side0.number, side1.number, seconds, checksum(data), data)

    def _cameras(self, side0: ImageEntry, side1: ImageEntry) -> tuple[Camera | None, Camera | None]:
        if self.pipeline.config.estimation.kind != "essential":
            return None, None
        cameras = [side.camera or self._camera for side in (side0, side1)]
        absent = [side.name for side, camera in zip((side0, side1), cameras, strict=True) if camera is None]
        if absent:
            raise MatcherError(f"geometry 'essential' needs the camera of {' and of '.join(absent)}")
        return cameras[0], cameras[1]

    def _features(self, image: ImageEntry) -> Features:
        if image.number in self._cache:
            self._cache.move_to_end(image.number)
            return self._cache[image.number]
        features = self._cache[image.number] = self._fetch(image)
        self._cached += _bytes(features)
        while self._cached > _CACHE_BYTES and len(self._cache) > 2:
            self._cached -= _bytes(self._cache.popitem(last=False)[1])
        return features


def _encoded(name: str, found: Extracted) -> ExtractedImage:
    kept = replace(found.features, descriptors=np.zeros((len(found.features), 0), np.float32))
    return ExtractedImage(name, replace(found, features=kept), encode_features(found.features))


def _bytes(features: Features) -> int:
    return to_numpy(features.descriptors).nbytes


def reason_of(error: Exception) -> str:
    """One line for the store and the terminal."""
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, MatcherError) else f"{type(error).__name__}: {text}"
