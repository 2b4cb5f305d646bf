"""From images to features, frame by frame, within a time budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from matcher.budget.choice import Choice, at_pace, limited, strongest
from matcher.budget.frames import FrameCosts
from matcher.budget.pace import Pace
from matcher.data.features import Features
from matcher.data.image import Image
from matcher.errors import ImageError
from matcher.pipeline import ImageInput, Mask, Pipeline
from matcher.sequence.contrast import AdaptiveContrast
from matcher.sequence.pipelines import for_neighbours


class FrameExtractor:
    """Reads frames and extracts their features.

    The first frame decides how a time budget is spent and, by its sharpness, the size of all frames. Where
    frames take longer than planned, because other programs use the machine, less is planned for the next; and
    where the extraction of a frame does, less is done with the rest of it.
    """

    def __init__(self, pipeline: Pipeline, budget_ms: float | None) -> None:
        self.pipeline = pipeline  # for frames far apart
        self.near = for_neighbours(pipeline) if budget_ms is None else pipeline  # for neighbouring ones
        self.choice: Choice | None = None  # what the budget led to, for the frame at hand
        self._budget_ms, self._contrast = budget_ms, AdaptiveContrast()
        self._costs: FrameCosts | None = None  # of the pipeline as it came
        self._planned: Choice | None = None
        self._pace, self._new = Pace(), False
        # Whether a first frame with keypoints has settled size and budget.
        self._decided = budget_ms is None and pipeline.config.extractor.soft_resize is None

    def read(self, frames: list[ImageInput], mask: Mask | None = None) -> list[Image]:
        """One image, or left and right, as the front end wants them; the mask is of the first.

        Raises:
            ImageError: an image cannot be read, or the two differ in size.
        """
        if self.choice != self._planned:
            self._use(self._planned)
        masks = [mask, *[None] * (len(frames) - 1)]
        images = [self.pipeline.read(*each) for each in zip(frames, masks, strict=True)]
        sizes = [image.size for image in images]
        if len(set(sizes)) > 1:
            raise ImageError(
                f"{images[0].path or 'a pair'}: a rectified pair has one size, not {sizes[0]} and "
                f"{sizes[1]}; rectify both to one size"
            )
        if self._decided or not len(self.extract(images[:1])[0]):
            return images
        self._decided = True
        if self._budget_ms is None:
            self.pipeline = _of_one_size(self.pipeline, images[0])
            return [images[0], *(self.pipeline.read(frame) for frame in frames[1:])]
        self._costs = FrameCosts(self.pipeline, images[0], stereo=len(images) > 1)
        self._plan()
        self._costs.settle()
        return [self.pipeline.read(*each) for each in zip(frames, masks, strict=True)]

    def took(self, milliseconds: float) -> None:
        """Plan anew for the next frames, where the last ones took longer, or no longer take longer."""
        if self.choice is None or self._new:
            self._new = False  # a first frame also measures, and those of a new size select kernels
            return
        self._pace.add(milliseconds, predicted=self.choice.predicted_ms / self.choice.pace)
        if self._pace.differs_from(self._planned.pace):
            self._plan()

    def _plan(self) -> None:
        self._planned = at_pace(self._costs.choose, self._budget_ms, self._pace.value)
        self._use(self._planned)
        self._new = True

    def _use(self, choice: Choice) -> None:
        self.choice = choice
        self.pipeline = self.near = limited(self._costs.pipeline, choice)

    def within_budget(self, features: list[Features], spent: Mapping[str, float]) -> list[Features]:
        """The features that the rest of the frame has time for, the strongest; `near` matches them.

        Args:
            features: of the frame's images.
            spent: on it so far, milliseconds: `extract`, and `total`.
        """
        if self.choice is None or self._new:  # the first extraction of a size is slower
            return features
        choice = self._costs.rest(self.choice, spent["total"], spent["extract"])
        if choice is self.choice:
            return features
        self._use(choice)
        return [strongest(found, choice.max_keypoints) for found in features]

    def extract(self, images: list[Image]) -> list[Features]:
        """Features of each image; beyond the points that a budget allows, the weakest are left out."""
        features = self._contrast.extract(self.pipeline.extractor, images)
        if self.choice is None:
            return features
        return [strongest(found, self.choice.max_keypoints) for found in features]


def _of_one_size(pipeline: Pipeline, image: Image) -> Pipeline:
    """The pipeline that resizes all images as it has resized this one."""
    config = pipeline.config.extractor
    resize = max(image.pixels.shape[:2]) if image.is_reduced(config.resize) else config.resize
    return replace(pipeline, config=replace(pipeline.config, extractor=config.of_size(resize)))
