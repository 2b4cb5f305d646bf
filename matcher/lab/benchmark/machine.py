"""The machine, its peak rates, and the work of a network (a roofline model)."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from matcher.config import ContextConfig
from matcher.kernels.linear import linear_at_once
from matcher.lab.benchmark.timing import Stopwatch


@dataclass(frozen=True)
class Machine:
    """The machine that a benchmark ran on."""

    processor: str
    cores: int
    threads: int
    units: str  # instruction sets for half precision
    device: str
    torch: str


@dataclass(frozen=True)
class PeakRates:
    """The rates that this device reaches in a large matrix product and a large copy."""

    float32: float  # operations per second
    half: float  # in the half precision that "auto" selects here, else bfloat16
    copy: float  # bytes per second, read and written


def describe_machine(device: torch.device) -> Machine:
    """This machine, as far as the operating system describes it."""
    checks = {"amx": torch.cpu._is_amx_tile_supported, "avx512_bf16": torch.cpu._is_avx512_bf16_supported}
    cuda = device.type == "cuda"
    return Machine(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        units=", ".join(name for name, present in checks.items() if present()) or "none",
        device=torch.cuda.get_device_name(device) if cuda else device.type,
        torch=torch.__version__,
    )


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@torch.inference_mode()
def measure_peak_rates(watch: Stopwatch, half: torch.dtype, side: int = 2048) -> PeakRates:
    """Measure products of square matrices of `side`, and a copy of 16 of them, alternately."""
    rng = torch.Generator().manual_seed(0)
    square = torch.randn(side, side, generator=rng).to(watch.device)
    halved, large = square.to(half), square.repeat(16, 1)
    target = torch.empty_like(large)
    times = watch.alternate(
        {
            "float32": lambda: linear_at_once(square, square),  # by the library that is faster here
            "half": lambda: halved @ halved,
            "copy": lambda: target.copy_(large),
        }
    )
    operations = 2 * side**3
    return PeakRates(
        float32=operations / times["float32"].minimum,
        half=operations / times["half"].minimum,
        copy=2 * large.nbytes / times["copy"].minimum,
    )


@dataclass(frozen=True)
class Workload:
    """The least operations and memory traffic of the attention layers and the last similarity."""

    operations: int  # multiplications and additions of matrix products
    bytes: int  # parameters read once, tokens and similarities read or written once by every product

    def seconds(self, operations: float, copy: float) -> float:
        """The roofline time: that of the slower of computation and memory traffic."""
        return max(self.operations / operations, self.bytes / copy)


def count_workload(config: ContextConfig, points0: int, points1: int, width: int) -> Workload:
    """Count the work of one pair without early exit and pruning.

    A token costs 10·dim² multiply-adds in a block with separate queries and keys, 9·dim² where they are
    shared: 3 (2) for queries, keys, values, 1 for the output, 4 and 2 for the feed-forward part.

    Args:
        config: of the context.
        points0, points1: keypoints of the two images.
        width: bytes of a number in the tokens.
    """
    tokens, dim = points0 + points1, config.dim
    projected = (10, 9 if config.shared_qk else 10)  # self, cross
    linear = tokens * dim**2 * sum(projected)
    attention = 2 * dim * (points0**2 + points1**2 + 2 * points0 * points1)
    assignment = tokens * dim**2 + points0 * points1 * dim
    # In and out: projection 1 + 3, attention 3 + 1, output 1 + 1, widening 2 + 2, narrowing 2 + 1.
    moved = 2 * 17 * tokens * dim * width + sum(projected) * dim**2 * width
    return Workload(
        operations=2 * (config.depth * (linear + attention) + assignment),
        bytes=config.depth * moved + 4 * points0 * points1,
    )
