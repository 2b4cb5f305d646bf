"""The benchmark as a whole: which rows it has, their order, and how they are printed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from matcher.benchmark import (
    rows as device_rows,
)
from matcher.benchmark import (
    rows as growth_rows,
)
from matcher.benchmark import (
    rows as kernel_rows,
)
from matcher.benchmark import (
    rows as network_rows,
)
from matcher.benchmark import (
    rows as onnx_rows,
)
from matcher.benchmark import (
    rows as preset_rows,
)
from matcher.benchmark import (
    rows as process_rows,
)
from matcher.benchmark import (
    rows as whole_rows,
)
from matcher.benchmark import (
    rows as worker_rows,
)
from matcher.benchmark.rows import BenchmarkRow, LayerClock
from matcher.benchmark.timing import (
    Machine,
    PeakRates,
    Samples,
    Stopwatch,
    describe_machine,
    measure_peak_rates,
)
from matcher.errors import UsageError
from matcher.evaluate.measure import auc, corner_error
from matcher.evaluate.protocols import HomographyPair
from matcher.loading import load
from matcher.match.network import DTYPES, resolve_precision
from matcher.pipeline import Pipeline
from matcher.types import Features, Matches

# --- report: The benchmark as a whole: which rows it has, their order, and how they are printed.

WHOLE = "whole work"  # how their names begin
_SCALES = {"ms": 1e3, "s": 1.0, "MiB": 2.0**-20}
SECONDS_A_ROW = 6.0  # on a GPU no new round of a row begins after that


@dataclass
class BenchmarkReport:
    """The machine and all measurements."""

    machine: Machine
    peaks: PeakRates
    half: str  # the precision of `peaks.half`
    rows: list[BenchmarkRow] = field(default_factory=list)
    stages: dict[str, Samples] = field(default_factory=dict)  # of one match of two files, in seconds


def run_benchmark(
    watch: Stopwatch,
    images: tuple[Path, Path],
    *,
    quick: bool = False,
    only: str | None = None,
    photos: Path | None = None,
    progress: Callable[[str], object] | None = None,
) -> BenchmarkReport:
    """Run the benchmark.

    Args:
        watch: the device, and how often and for how long rows are repeated.
        images: two image files of one scene.
        quick: small sizes and few repeats, to check that every row runs.
        only: run the rows whose name contains this text; the machine is always described. Rows of whole
            work, a minute or two each, run only so.
        photos: a folder of 20 photos of one place, for collections and reconstructions; without it
            collections are of views of `images`, and nothing is reconstructed.
        progress: called with each line of the table as soon as it is measured.

    Raises:
        UsageError: a package to compare with is not installed, there are too few photos, or `only` needs
            photos and there are none.
    """
    if photos is None and only == "sfm":
        raise UsageError("a reconstruction needs photos of one place: name their folder (photos)")
    if quick:
        watch = replace(watch, repeats=min(watch.repeats, 2))
    if watch.device.type == "cuda":  # a short loan of a machine is enough for the whole table
        watch = replace(watch, seconds=min(watch.seconds, SECONDS_A_ROW))
    precision = resolve_precision("auto", watch.device)
    half = precision if precision != "float32" else "bfloat16"
    peaks = measure_peak_rates(watch, DTYPES[half], side=256 if quick else 2048)
    report = BenchmarkReport(describe_machine(watch.device), peaks, half)
    report_line = progress or (lambda line: None)
    for line in heading(report):
        report_line(line)
    for name, make in _plan(watch, peaks, images, photos, quick):
        if _wanted(name, only, watch.device):
            _measure(name, make, report, report_line)
    if watch.device.type == "cpu" and (only is None or only in "stages"):
        report.stages = preset_rows.stages(load(max_keypoints=_limit(quick)), images, watch.repeats)
        report_line(format_stages(report.stages))
    return report


def _measure(
    name: str,
    make: Callable[[], Iterator[BenchmarkRow]],
    report: BenchmarkReport,
    report_line: Callable[[str], object],
) -> None:
    try:
        for row in make():
            report.rows.append(row)
            report_line(format_row(row))
    except torch.OutOfMemoryError:  # of a GPU; the other rows may fit
        report_line(f"| {name} | | the memory of this device is too small for it | | | |")
        torch.cuda.empty_cache()


def _wanted(name: str, only: str | None, device: torch.device) -> bool:
    """Whether rows are measured: those that are named, else all but whole work, and a device's on a GPU."""
    if only is not None:
        return only.lower() in name.lower()
    return not name.startswith((WHOLE,) if device.type == "cuda" else (WHOLE, "device"))


def _plan(
    watch: Stopwatch, peaks: PeakRates, images: tuple[Path, Path], photos: Path | None, quick: bool
) -> Iterator[tuple[str, Callable[[], Iterator[BenchmarkRow]]]]:
    """Names of rows, each with a function that measures them."""
    cuda = watch.device.type == "cuda"
    sizes = (64,) if quick else (512, 1024, 2048, 4096) if cuda else (512, 1024, 2048)
    for batch in (1, 2 if quick else 32) if cuda else (1,):
        for points in sizes:
            yield (
                f"lightglue {points} batch {batch}",
                lambda n=points, b=batch: network_rows.lightglue(watch, n, peaks, b),
            )
    yield "superglue", lambda: network_rows.superglue(watch, 64 if quick else 2048)
    yield "loftr", lambda: network_rows.loftr(watch, *((64, 48) if quick else (640, 480)))
    yield "ragged", lambda: network_rows.ragged(watch, *((3, 8, 24) if quick else (16, 300, 700)))
    yield "memory", lambda: network_rows.lightglue_memory(watch, 64 if quick else 4096)
    limit = _limit(quick)

    def on_features(measure: Callable[..., Iterator[BenchmarkRow]]) -> Iterator[BenchmarkRow]:
        side = 2 * preset_rows.LONGER_SIDE
        pipe = load(device=str(watch.device), max_keypoints=limit, resize=side, **network_rows.OFF)
        features = tuple(pipe.extract(preset_rows.enlarged(path)) for path in images)
        return measure(pipe, features)

    frame = (64, 48) if quick else (640, 480)
    yield "extraction", lambda: preset_rows.extraction(watch, images[0], frame, limit // 2)
    yield "sinkhorn", lambda: on_features(lambda pipe, found: preset_rows.sinkhorn(watch, pipe, found))
    yield "adaptivity", lambda: on_features(lambda _, found: preset_rows.adaptivity(watch, found))
    yield (
        "refinement",
        lambda: preset_rows.refinement(
            watch, load(device=str(watch.device), max_keypoints=limit), images, 50 if quick else 1000
        ),
    )
    if not cuda:
        yield "kernels", lambda: kernel_rows.kernel_rows(watch)
    yield f"{WHOLE}: pairs", lambda: whole_rows.pair_rows(watch, images, frame, limit // 2)
    yield from _onnx_plan(watch, images, quick)
    yield from _whole_plan(watch, images, photos, quick)
    yield from _device_plan(watch, images, quick)
    growth = (32, 64, 128) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    yield f"{WHOLE}: growth of keypoints", lambda: growth_rows.keypoint_rows(watch, images, growth)
    many = 2 if quick else 20 if cuda else 100
    for points in (limit // 4, limit // 2, limit):
        yield (
            f"one against many {points}",
            lambda n=points: preset_rows.one_against_many(
                watch, load(device=str(watch.device), max_keypoints=n), images, many
            ),
        )


def _onnx_plan(
    watch: Stopwatch, images: tuple[Path, Path], quick: bool
) -> Iterator[tuple[str, Callable[[], Iterator[BenchmarkRow]]]]:
    """Rows in ONNX Runtime; torch takes a minute to export a network that they are compared with."""
    if watch.device.type != "cpu":
        return
    frame = (320, 240) if quick else (640, 480)
    yield (
        f"{WHOLE}: onnx front end",
        lambda: onnx_rows.front_ends(watch, images[0], frame, _limit(quick) // 2),
    )
    for points in (64,) if quick else (512, 1024, 2048):
        yield f"{WHOLE}: onnx preset", lambda n=points: onnx_rows.preset_rows(watch, images, n)
    for points in (64,) if quick else (512, 1024):
        yield f"{WHOLE}: onnx lightglue", lambda n=points: onnx_rows.lightglue_onnx_rows(watch, n)


def _device_plan(
    watch: Stopwatch, images: tuple[Path, Path], quick: bool
) -> Iterator[tuple[str, Callable[[], Iterator[BenchmarkRow]]]]:
    """Rows of the default preset on a device."""
    limit, frame = _limit(quick), (64, 48) if quick else (640, 480)
    for points in (64,) if quick else (512, 1024, 2048, 4096):
        yield f"device: match {points}", lambda n=points: device_rows.match_rows(watch, images, n)
    sizes = (1, 2) if quick else (1, 8, 32)
    yield "device: batches", lambda: device_rows.batch_rows(watch, images, limit // 2, sizes)
    count = 2 if quick else 8
    yield (
        "device: extraction",
        lambda: device_rows.extraction_rows(watch, images[0], frame, limit // 2, count),
    )


def _whole_plan(
    watch: Stopwatch, images: tuple[Path, Path], photos: Path | None, quick: bool
) -> Iterator[tuple[str, Callable[[], Iterator[BenchmarkRow]]]]:
    """Rows of whole work on the processor, each a minute or two."""
    if watch.device.type != "cpu":
        return
    limit, kornia = _limit(quick), 1 if quick else 4
    frame = (64, 48) if quick else (640, 480)
    yield f"{WHOLE}: pairs", lambda: process_rows.pair_memory_row(watch, images, frame, limit // 2)

    def on_photos(measure: Callable[[Path], Iterator[BenchmarkRow]]) -> Iterator[BenchmarkRow]:
        with tempfile.TemporaryDirectory() as folder:
            count = 3 if quick else 20
            yield from measure(process_rows.copy_photos(photos, images, Path(folder), count))

    yield (
        f"{WHOLE}: collection",
        lambda: on_photos(lambda chosen: process_rows.collection_rows(watch, chosen, limit, kornia)),
    )
    if photos is not None:
        yield f"{WHOLE}: sfm", lambda: on_photos(lambda chosen: process_rows.sfm_rows(watch, chosen))
    pictures, stored = ((4, 8), (10, 20)) if quick else ((10, 100, 1000), (100, 1000, 10_000, 100_000))
    yield f"{WHOLE}: growth of images", lambda: growth_rows.image_rows(watch, images, pictures)
    yield f"{WHOLE}: growth of the store", lambda: growth_rows.stored_pair_rows(watch, stored)
    views = (4, 64, 2) if quick else (40, 512, 12)
    yield f"{WHOLE}: workers", lambda: worker_rows.worker_rows(images, *views)


def _limit(quick: bool) -> int:
    return 128 if quick else 2048


def check_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        UsageError: neither cpu nor cuda, or no CUDA device here.
    """
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"the benchmark runs on cpu or cuda, not on {name}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here; use --device cpu")
    return device


def heading(report: BenchmarkReport) -> list[str]:
    """The machine, its peak rates, and the head of the table."""
    machine, peaks = report.machine, report.peaks
    return [
        f"{machine.processor}, {machine.cores} cores, {machine.threads} threads, bfloat16 units: "
        f"{machine.units}; device {machine.device}; torch {machine.torch}",
        f"peak rates: float32 {peaks.float32 / 1e9:.0f} GFLOP/s, {report.half} {peaks.half / 1e9:.0f} "
        f"GFLOP/s (matrix products), copy {peaks.copy / 1e9:.1f} GB/s",
        "",
        "| work | against | ours: min / median / max | theirs | ratio | |",
        "|---|---|---|---|---|---|",
    ]


def format_row(row: BenchmarkRow) -> str:
    """A row of the Markdown table."""
    ours, theirs = (_spread(samples, row.unit) for samples in (row.ours, row.theirs))
    return f"| {row.work} | {row.against} | {ours} | {theirs} | {row.ratio:.2f} | {row.note} |"


def format_stages(stages: dict[str, Samples]) -> str:
    """The stages of matching two files, in one line."""
    parts = ", ".join(f"{name} {1e3 * samples.median:.0f}" for name, samples in stages.items())
    return f"\nmatching two files, median milliseconds per stage: {parts}"


def _spread(samples: Samples, unit: str) -> str:
    scale = _SCALES[unit]
    values = [scale * value for value in (samples.minimum, samples.median, samples.maximum)]
    return f"{' / '.join(f'{value:.1f}' for value in values)} {unit}"


def to_json(report: BenchmarkReport) -> dict[str, Any]:
    """The report as plain data; times in seconds, memory in bytes."""
    return {
        "machine": asdict(report.machine),
        "peaks": {**asdict(report.peaks), "half_precision": report.half},
        "rows": [
            {
                "work": row.work,
                "against": row.against,
                "unit": "bytes" if row.unit == "MiB" else "s",
                "ours": _numbers(row.ours),
                "theirs": _numbers(row.theirs),
                "ratio": row.ratio,
                "note": row.note,
            }
            for row in report.rows
        ],
        "stages": {name: _numbers(samples) for name, samples in report.stages.items()},
    }


def _numbers(samples: Samples) -> dict[str, Any]:
    found = {"min": samples.minimum, "median": samples.median, "max": samples.maximum}
    return {**found, "values": list(samples.values)}


# --- comparison: Compare two settings of one preset on the same pairs: identical matches, accuracy and
# time.

THRESHOLDS = (3.0, 5.0, 10.0)  # pixels


@dataclass
class SettingResult:
    """The results of one pipeline."""

    pipeline: Pipeline
    errors: list[float] = field(default_factory=list)  # corner error in pixels, one per pair
    context: list[float] = field(default_factory=list)  # seconds in the attention layers
    match: list[float] = field(default_factory=list)  # seconds of matching, from given features
    layers: list[int] = field(default_factory=list)  # layers that ran
    kept: list[float] = field(default_factory=list)  # share of the keypoints left after pruning

    def accuracy(self) -> tuple[float, ...]:
        """AUC of the corner error at `THRESHOLDS`."""
        return tuple(float(auc(np.array(self.errors), threshold)) for threshold in THRESHOLDS)


@dataclass
class Comparison:
    """The results of both, and how far their matches agree."""

    first: SettingResult
    second: SettingResult
    same: int = 0  # matches that both found
    either: int = 0  # the larger of both numbers of matches, summed over pairs

    @property
    def identical(self) -> float:
        """Share of the matches that both found."""
        return self.same / max(self.either, 1)

    def lines(self) -> list[str]:
        """The comparison as text."""
        lines = []
        for name, result in (("first", self.first), ("second", self.second)):
            share = ", ".join(
                f"@{t:g} {100 * a:.2f}" for t, a in zip(THRESHOLDS, result.accuracy(), strict=True)
            )
            medians, sums = (
                ", ".join(f"{part} {1e3 * total(getattr(result, part)):.1f}" for part in ("context", "match"))
                for total in (np.median, np.sum)
            )
            depth, kept = np.mean(result.layers), np.mean(result.kept)
            lines.append(
                f"{name}: AUC {share}; layers {depth:.2f}, keypoints kept {kept:.1%}; "
                f"median ms: {medians}; total ms: {sums}"
            )
        context, match = (
            sum(getattr(self.second, part)) / sum(getattr(self.first, part)) for part in ("context", "match")
        )
        lines.append(
            f"{self.identical:.2%} of {self.either} matches identical over {len(self.first.errors)} pairs; "
            f"the first is {context:.2f}× as fast in the attention layers, {match:.2f}× in matching"
        )
        return lines


def compare(
    first: Pipeline,
    second: Pipeline,
    pairs: Sequence[HomographyPair],
    watch: Stopwatch,
    progress: Callable[[int, int], object] | None = None,
) -> Comparison:
    """Match every pair with both pipelines, from the features that the first one extracts.

    Args:
        first, second: with attention networks and homographies as their geometry.
        pairs: with known homographies.
        watch: the device and the clock.
        progress: called after every pair.
    """
    both = Comparison(SettingResult(first), SettingResult(second))
    clocks = [LayerClock(result.pipeline.matcher, watch) for result in (both.first, both.second)]
    for position in range(len(pairs)):
        pair = pairs[position]
        resize = first.config.extractor.resize
        images = [image.open(resize, None) for image in (pair.image0, pair.image1)]
        features = first.extractor(images)
        tables = []
        for result, clock in zip((both.first, both.second), clocks, strict=True):
            if not position:
                result.pipeline.match_features(*features)
            tables.append(_match(result, clock, features, pair, watch))
        both.same += len(tables[0] & tables[1])
        both.either += max(map(len, tables))
        if progress is not None:
            progress(position + 1, len(pairs))
    return both


def _match(
    result: SettingResult, clock: LayerClock, features: list[Features], pair: HomographyPair, watch: Stopwatch
) -> set[tuple[int, int]]:
    found: list[Matches] = []
    clock.seconds = 0.0
    result.match.append(watch.once(lambda: found.append(result.pipeline.match_features(*features))))
    (matches,) = found
    result.context.append(clock.seconds)
    result.layers.append(matches.layers_run)
    result.kept.append((matches.kept0 + matches.kept1) / max(sum(map(len, features)), 1))
    geometry = result.pipeline.estimator(matches.points0, matches.points1, scores=matches.scores)
    result.errors.append(corner_error(geometry.matrix, pair.H_1_from_0, features[0].image_size))
    return set(map(tuple, matches.indices.tolist()))
