"""Settings with which the frames of a sequence keep a time budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from matcher.budget.choice import (
    POINTS_WHOLE,
    REFINEMENT,
    SIZES,
    Choice,
    Parts,
    at_pace,
    best_choice,
    enough,
    limited,
    matching_cost,
    milliseconds,
    refining_cost,
)
from matcher.data.features import Features
from matcher.data.image import Image

_LEAST_POINTS = 256  # rather than fewer, a smaller image is used


class FrameCosts:
    """What frames of a sequence cost, by keypoints, layers and size of the image."""

    def __init__(self, pipeline: Parts, image: Image, *, stereo: bool = False) -> None:
        """Set up.

        Args:
            pipeline: its `max_keypoints`, depth and `resize` are upper limits.
            image: a frame as it comes, on which the costs are measured (a second or two).
            stereo: a frame is two images, and two pairs are matched.
        """
        self.pipeline, self._times = pipeline, 2 if stereo else 1
        self._refine = refining_cost(pipeline, image)
        self._image: Image | None = image
        self._side = max(image.pixels.shape[:2])
        self._sizes: dict[float, float] = {}  # milliseconds of extraction by scale factor
        self._match: Callable[[int, int], float] | None = None  # of matching, by points and layers
        self._measured = 0  # points that it was measured with, at most

    def choose(self, budget_ms: float) -> Choice:
        """The best combination that fits a budget in milliseconds per frame, extraction included.

        Among those that fit, the one with the largest layers · √keypoints is chosen: halving the keypoints
        loses fewer tracks than halving the layers. Smaller images are used only if fewer than 256 keypoints
        would be left, and refinement is left out only if fewer than 512 would be.
        """
        return self._refined_or_not(self.pipeline, lambda refine: self._first_that_fits(budget_ms, refine))

    def rest(self, choice: Choice, spent_ms: float, extract_ms: float) -> Choice:
        """What the rest of a frame is done with, once its features are extracted.

        Extraction shows how busy the machine is at this moment. Where the rest, slower by as much, would
        exceed the budget, there are fewer points and layers.

        Args:
            choice: of the frame's plan.
            spent_ms: on the frame so far.
            extract_ms: of it, on extraction.

        Returns:
            `choice` itself, or one for images of the same size.
        """
        known = self._times * self._at(self._factor(choice))[0] * choice.pace
        slower = extract_ms / max(known, 1e-6)
        if slower <= 1 or spent_ms + slower * (choice.predicted_ms - known) <= choice.budget_ms:
            return choice
        pace, pipeline = slower * choice.pace, limited(self.pipeline, choice)
        match = self._at(self._factor(choice))[1]

        def within(budget_ms: float, refine: Callable[[float], float]) -> Choice:
            before = spent_ms / (pace * self._times)
            cost = self._with_refinement(match, refine)
            return best_choice(pipeline, cost, self._times, before, budget_ms, choice.resize)

        def fitting(refine: Callable[[float], float]) -> Choice:
            return at_pace(lambda budget_ms: within(budget_ms, refine), choice.budget_ms, pace)

        found = self._refined_or_not(pipeline, fitting)
        return replace(found, without=found.without or choice.without)

    def settle(self) -> None:
        """Measure all that is still to be known, since later frames cannot wait."""
        for factor in SIZES:
            self._at(factor)
        self._image = None

    def _refined_or_not(
        self, pipeline: Parts, fitting: Callable[[Callable[[float], float]], Choice]
    ) -> Choice:
        """What fits with the cost of refinement, or, where that leaves too few points, without refinement."""
        if pipeline.config.refine is None:
            return fitting(_nothing)
        best = fitting(self._refine)
        if enough(pipeline, best, POINTS_WHOLE):
            return best
        return replace(fitting(_nothing), without=(REFINEMENT,))

    def _with_refinement(
        self, match: Callable[[int, int], float], refine: Callable[[float], float]
    ) -> Callable[[int, int], float]:
        """Milliseconds of one of a frame's pairs; a frame is refined once."""
        return lambda count, layers: match(count, layers) + refine(count) / self._times

    def _factor(self, choice: Choice) -> float:
        """Which of the sizes a choice is for."""
        return min(SIZES, key=lambda factor: abs(factor * self._side - choice.resize))

    def _first_that_fits(self, budget_ms: float, refine: Callable[[float], float]) -> Choice:
        """The choice for the largest images that leave enough keypoints."""
        best: Choice | None = None
        for factor in SIZES:
            extract_ms, match = self._at(factor)
            cost = self._with_refinement(match, refine)
            resize = max(1, round(self._side * factor))
            found = best_choice(self.pipeline, cost, self._times, extract_ms, budget_ms, resize)
            if best is None or found.fits or found.predicted_ms < best.predicted_ms:
                best = found
            if enough(self.pipeline, found, _LEAST_POINTS):
                break
        return best

    def _at(self, factor: float) -> tuple[float, Callable[[int, int], float]]:
        """Milliseconds of extraction, and of matching, for images of a size."""
        if factor not in self._sizes:
            smaller = self._image if factor == 1.0 else self._image.resized(factor)
            extract_ms, features = _extraction(self.pipeline, smaller)
            if self._match is None or len(features) > self._measured:
                self._match, self._measured = matching_cost(self.pipeline, features), len(features)
            self._sizes[factor] = extract_ms
        return self._sizes[factor], self._match


def _extraction(pipeline: Parts, image: Image) -> tuple[float, Features]:
    features = pipeline.extractor([image])[0]
    return milliseconds(lambda: pipeline.extractor([image])), features


def _nothing(count: float) -> float:
    """The cost of what is left out."""
    return 0.0
