"""A trial of `Result.verdict` on pairs that it was not fitted on: unrelated photos, lookalikes and warps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import combinations
from pathlib import Path

import numpy as np

from matcher.data.features import Features
from matcher.data.image import Image
from matcher.data.photos import find_images
from matcher.data.protocols import Extractor
from matcher.errors import UsageError
from matcher.lab.evaluate.verdicts import pair_evidence
from matcher.lab.pairs.folders import FRAME_GAPS, distant_frames, read_kitti
from matcher.lab.pairs.protocols import Pair, PairImage, UnrelatedPair
from matcher.lab.pairs.synthetic import synthetic_set
from matcher.passes.crops import LocalMatcher
from matcher.pipeline import Pipeline
from matcher.verify.verdict import EVIDENCE, NOT, SAME, probability

UNRELATED, LOOKALIKES, SCENES = "photos of different sources", "photos of one source", "scenes"
DISTANT, NEIGHBOURS = "distant frames of a street", "neighbouring frames"
WARPS = "warps of levels 1 to 3"
RELATED = (WARPS, NEIGHBOURS)  # the kinds whose pairs show the same place
_FEWEST = 20  # photos of a source from which pairs of photos that look alike are drawn
_DISTANT = 40.0  # metres between frames that count as distant
_KEPT = 400  # images whose features are kept in memory
_Z = 1.645  # one-sided 95 %


@dataclass(frozen=True)
class TrialPair:
    """A pair and its kind."""

    kind: str
    pair: Pair

    @property
    def same(self) -> bool:
        """Whether it shows the same place."""
        return self.kind in RELATED


@dataclass(frozen=True)
class TrialSize:
    """How many pairs of each kind a trial draws, at most."""

    unrelated: int = 3000
    lookalikes: int = 300
    related: int = 300


@dataclass(eq=False)
class KindResult:
    """The verdicts on the pairs of a kind."""

    kind: str
    probabilities: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """Names of the pairs that are called the opposite of what they are."""
        at = np.asarray(self.probabilities)
        wrong = at <= NOT if self.kind in RELATED else at >= SAME
        return [self.names[i] for i in np.flatnonzero(wrong)]

    def row(self) -> list[str]:
        """Kind, pairs, called same, unsure, called different, and the upper bound on the share of errors."""
        at = np.asarray(self.probabilities)
        same, different = int((at >= SAME).sum()), int((at <= NOT).sum())
        bound = upper_bound(len(self.wrong), len(at))
        counts = (len(at), same, len(at) - same - different, different)
        return [self.kind, *map(str, counts), f"{bound:.4f}"]


def upper_bound(wrong: int, total: int) -> float:
    """The share of errors that is not exceeded with a confidence of 95 % (Wilson's score interval)."""
    if not total:
        return 1.0
    share, z2 = wrong / total, _Z * _Z / total
    spread = _Z * np.sqrt(share * (1 - share) / total + z2 / (4 * total))
    return float((share + z2 / 2 + spread) / (1 + z2))


def trial_pairs(data: Path, counts: TrialSize, seed: int = 0) -> Iterator[TrialPair]:
    """The pairs of the trial, kind by kind; none was used for the fit.

    Args:
        data: holds `photos/val` in folders by source, `multiview/*/SCENE` and `bench/kitti_mini`. Photos of a
            source with many photos are lookalikes, such as façades of one city, and so are frames of a street
            that are 40 m apart or more, although the far end of the street may be seen in both.
        counts: pairs of a kind.
        seed: of everything that is drawn.

    Raises:
        UsageError: a folder is absent.
    """
    rng = np.random.default_rng(seed)
    photos = find_images(data / "photos" / "val")
    sources = _by_folder(photos)
    pairs = [(a, b) for a, b in combinations(photos, 2) if a.parent != b.parent]
    yield from _drawn(UNRELATED, pairs, counts.unrelated, rng)
    alike = [pair for group in sources if len(group) >= _FEWEST for pair in combinations(group, 2)]
    yield from _drawn(LOOKALIKES, alike, counts.lookalikes, rng)
    scenes = [_views(folder) for folder in sorted(data.glob("multiview/*/*")) if folder.is_dir()]
    if len(scenes) < 2:
        raise UsageError(f"{data / 'multiview'}: pairs of different scenes need at least two scenes")
    between = [_two_scenes(scenes, rng) for _ in range(counts.lookalikes)]
    yield from _drawn(SCENES, between, counts.lookalikes, rng)
    street = data / "bench" / "kitti_mini"
    yield from _drawn(DISTANT, distant_frames(street, _DISTANT), counts.lookalikes, rng)
    frames = read_kitti(street)
    nearest = [pair for pair in frames.pairs if pair.group == f"gap {FRAME_GAPS[0]}"]
    yield from (TrialPair(NEIGHBOURS, pair) for pair in nearest[: counts.related])
    if counts.related:
        warps = synthetic_set(photos, count=counts.related, levels=(1, 2, 3), seed=seed)
        yield from (TrialPair(WARPS, pair) for pair in warps.pairs)


def try_verdicts(
    pipeline: Pipeline,
    pairs: Iterable[TrialPair],
    progress: Callable[[KindResult], None] | None = None,
    known: Findings | None = None,
) -> list[KindResult]:
    """The verdicts of a pipeline on the pairs, by kind.

    Features of an image are computed once for all its pairs, so that thousands of pairs take less time.

    Args:
        pipeline: estimates a geometry, without which there is no verdict.
        pairs: those of a kind follow each other.
        progress: called with the kind's results so far after each pair.
        known: evidence of earlier pairs, which are not matched again; that of the others is added.
    """
    pipeline, found = with_kept_features(pipeline), {}
    known = Findings() if known is None else known
    for each in pairs:
        values = known.get(each)
        if values is None:
            values = pair_evidence(pipeline, each.pair)
            known.add(each, values)
        kind = found.setdefault(each.kind, KindResult(each.kind))
        kind.probabilities.append(probability(values))
        kind.names.append(each.pair.name)
        if progress is not None:
            progress(kind)
    return list(found.values())


class Findings:
    """Evidence of pairs, kept in a file of JSON lines, so that a long trial can be continued.

    The verdict takes no part in matching, so the same evidence serves other coefficients.

    Args:
        path: of the file, which need not exist; None keeps nothing.

    Raises:
        UsageError: the file holds something else.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._known = path, {}
        if path is None or not path.exists():
            return
        lines = path.read_text().split("\n")
        if lines[-1]:  # the line that was being written
            path.write_text("".join(f"{line}\n" for line in lines[:-1]))
        for number, line in enumerate(lines[:-1], 1):
            try:
                row = json.loads(line)
                values = np.array(row["evidence"], dtype=np.float64)
                self._known[row["kind"], row["name"]] = values.reshape(len(EVIDENCE))
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(f"{path}: line {number} holds no evidence of a pair") from error

    def get(self, one: TrialPair) -> np.ndarray | None:
        """The evidence of a pair, if it is known."""
        return self._known.get((one.kind, one.pair.name))

    def add(self, one: TrialPair, values: np.ndarray) -> None:
        """Keep the evidence of a pair."""
        self._known[one.kind, one.pair.name] = values
        if self._path is not None:
            row = {"kind": one.kind, "name": one.pair.name, "evidence": values.tolist()}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


@dataclass(eq=False)
class KeptFeatures:
    """An extractor that remembers the features of the images it saw last."""

    extractor: Extractor
    kept: dict[bytes, Features] = field(default_factory=dict)

    def __call__(self, images: Sequence[Image]) -> list[Features]:
        """Features of each image, computed or remembered."""
        return [self._one(image) for image in images]

    def _one(self, image: Image) -> Features:
        if image.mask is not None:
            return self.extractor([image])[0]
        known = repr((image.pixels.shape, image.size, image.orientation)).encode()
        key = blake2b(image.pixels.tobytes() + known, digest_size=16).digest()
        found = self.kept.pop(key, None)
        if found is None:
            found = self.extractor([image])[0]
            while len(self.kept) >= _KEPT:
                del self.kept[next(iter(self.kept))]
        self.kept[key] = found
        return found


def with_kept_features(pipeline: Pipeline) -> Pipeline:
    """The same pipeline; its front ends remember features."""
    extractor, passes = KeptFeatures(pipeline.extractor), pipeline.passes
    if passes is not None:
        own = LocalMatcher(extractor, passes.own.matcher)
        other = None if passes.other is None else _remembering(passes.other)
        passes = replace(passes, own=own, other=other)
    return replace(pipeline, extractor=extractor, passes=passes)


def _remembering(load: Callable[[], LocalMatcher]) -> Callable[[], LocalMatcher]:
    loaded: list[LocalMatcher] = []

    def again() -> LocalMatcher:
        if not loaded:
            other = load()
            loaded.append(LocalMatcher(KeptFeatures(other.extractor), other.matcher))
        return loaded[0]

    return again


def as_markdown(found: Sequence[KindResult]) -> str:
    """A table of the verdicts, and the names of wrong ones below it."""
    header = ["pairs", "number", "called same", "unsure", "called different", "error rate below (95 %)"]
    rows = [header, ["---"] * len(header), *(kind.row() for kind in found)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += [f"wrong, {kind.kind}: {name}" for kind in found for name in kind.wrong]
    return "\n".join(lines) + "\n"


def _drawn(
    kind: str, pairs: list[tuple[Path, Path]], count: int, rng: np.random.Generator
) -> Iterator[TrialPair]:
    for i in rng.permutation(len(pairs))[:count].tolist():
        path0, path1 = pairs[i]
        name = f"{path0.parent.name}/{path0.name} {path1.parent.name}/{path1.name}"
        yield TrialPair(kind, UnrelatedPair(name, "", PairImage(path0), PairImage(path1)))


def _two_scenes(scenes: list[list[Path]], rng: np.random.Generator) -> tuple[Path, Path]:
    chosen = (scenes[i] for i in rng.choice(len(scenes), 2, replace=False))
    return tuple(scene[rng.integers(len(scene))] for scene in chosen)


def _views(scene: Path) -> list[Path]:
    """The photos of a scene, without its depth maps."""
    found = [path for path in find_images(scene) if not path.stem.endswith("_depth")]
    return [path for path in found if path.relative_to(scene).parts[0] != "depth"]


def _by_folder(paths: list[Path]) -> list[list[Path]]:
    folders: dict[Path, list[Path]] = {}
    for path in paths:
        folders.setdefault(path.parent, []).append(path)
    return list(folders.values())
