"""Published weights of others: fetched or given by the user, and made weights files of ours.

A checkpoint is read to tensors by name, strictly and without running any code in it, and the layout that
knows most of the names says what they are here.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import re
import sqlite3
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, build_opener

import torch
from torch import Tensor, nn

from matcher.config import ExtractorConfig, NetworkConfig, resolve
from matcher.errors import IntegrityError, UsageError
from matcher.extract.extractor import find_front_end
from matcher.files import open_given, write_whole
from matcher.match.network import MatchingNetwork
from matcher.presets import LOFTR_TRANSPORT, find_preset
from matcher.weights import files
from matcher.weights.files import LARGEST_WEIGHTS, Published, find_published

_SUFFIXES = (".pth", ".ckpt", ".pt", ".bin", ".safetensors")
# Keys under which training checkpoints keep the network, beside the optimiser and the rest.
_CONTAINERS = ("state_dict", "model", "model_state_dict", "extractor", "disk", "net")


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, without `matcher.` and `module.`; no code in it runs."""
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"{path}: a checkpoint ends in {', '.join(_SUFFIXES)}")
    data = files.read_bytes(path, "check the path")
    if fault := page_fault(data[:512]):
        raise IntegrityError(f"{path} {fault}")
    if path.suffix.lower() == ".safetensors":
        try:
            found, metadata = files.read_tensors(data), files.read_header(data)
        except IntegrityError as error:
            raise IntegrityError(f"{path} {error}: fetch it again") from error
        if "config" in metadata:
            raise UsageError(f"{path} is one of this package's weights files already: give it as weights")
    else:
        found = _unpickle(path, data)
    stripped: dict[str, Tensor] = {}
    for name, tensor in found.items():
        short = re.sub(r"^((matcher|module)\.)+", "", name)
        if short in stripped:
            raise IntegrityError(f"{path} holds {short} twice, with and without a prefix: use another file")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex() or tensor.is_meta:
            raise IntegrityError(f"{path} holds {name} in a form that is not plain numbers: use another file")
        stripped[short] = tensor.detach()
    return stripped


def page_fault(start: bytes) -> str | None:
    """What a file is if it is no checkpoint at all, from its first bytes; None when it may be one."""
    start = start.lstrip()
    if start[:16].lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "is a web page, not a checkpoint: the link led to a page about the file; fetch the file itself"
    if start.startswith(b"version https://git-lfs"):
        return "is a git-lfs pointer, not the file itself: run `git lfs pull`"
    return None if start else "is empty: fetch it again"


def _unpickle(path: Path, data: bytes) -> dict[str, Tensor]:
    """The state dict itself, or the one under a known key of a training checkpoint."""
    if data[:2] != b"PK" and data[:1] != b"\x80":
        raise IntegrityError(f"{path} is not a file of torch.save, or is damaged: fetch it again")
    try:
        content: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # of what a damaged archive makes torch raise there is no list
        reason = " ".join(f"{type(error).__name__} {error}".split())
        if found := re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", reason):
            raise IntegrityError(
                f"{path} holds more than tensors ({found[1].rstrip('.,')}), which could run code, so it was"
                " not opened. Save its tensors alone, torch.save({name: tensor}), where that is safe"
            ) from error
        raise IntegrityError(f"{path} is damaged or cut short ({reason[-160:]}): fetch it again") from error
    for _ in range(3):
        inner = [content.get(key) for key in _CONTAINERS] if isinstance(content, dict) else []
        content = next((each for each in inner if isinstance(each, dict)), content)
    content = content if isinstance(content, dict) else {type(content).__name__: None}
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if tensors and all(isinstance(name, str) for name in tensors):
        return tensors
    keys = ", ".join(map(str, list(content)[:8]))
    raise IntegrityError(f"{path} holds no network's tensors (it has {keys or 'nothing'}): use another file")


# Orders of channels: (channels, heads) → for each channel of ours, which one of theirs it is.


def rotary(channels: int, heads: int) -> Tensor:
    """Of each head, neighbouring channels that turn together, (0, 1), (2, 3), …, as c and c + width/2."""
    return torch.arange(channels).view(heads, -1, 2).transpose(1, 2).flatten()


def interleaved_rotary(channels: int, heads: int) -> Tensor:
    """LightGlue's fused projection, rows (head, channel, q k v) → q, k, v of whole heads, as in `rotary`."""
    q, k, v = torch.arange(channels).view(-1, 3).t()
    turned = rotary(len(v), heads)
    return torch.cat([q[turned], k[turned], v])


def fast_heads(channels: int, heads: int) -> Tensor:
    """SuperGlue's vectors, in which channel d of head h lies at d·heads + h → whole heads."""
    return torch.arange(channels).view(-1, heads).t().flatten()


class CheckpointLayout(NamedTuple):
    """How the parameters of a system are named and ordered, as `layouts.toml` says."""

    system: str
    renames: tuple[tuple[str, str | Callable[[re.Match], str]], ...] = ()
    orders: tuple[tuple[str, Callable | str, Callable | str], ...] = ()
    ignored: str = "(?!)"  # no name

    def ours(self, name: str) -> str:
        """Our name for a tensor of theirs; their own where no rename fits."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name


def _alternating(match: re.Match) -> str:
    """Of a layer whose even ones attend within an image, and odd ones across."""
    number = int(match["layer"])
    return f"layers.{number // 2}.{'cross' if number % 2 else 'self'}_block"


def _position(match: re.Match) -> str:
    """Of SuperGlue's linear maps, norms and functions by turns."""
    number = int(match[1])
    part = ("linear", "norm", "function")[number % 3]
    return "position.out" if number == 12 else f"position.hidden.{number // 3}.{part}"


def _level(match: re.Match) -> str:
    """Of LoFTR's pyramid: residual blocks, what joins them, and what is done to the joined."""
    level, part = int(match[1]) - 1, {"0": "inner.conv", "1": "inner.norm", "3": "outer"}.get(match[3])
    if part is not None:
        return f"backbone.merges.{level}.{part}"
    return f"backbone.{'laterals' if match[2] else 'stages'}.{level}"


_FUNCTIONS = {
    "{alternating}": _alternating,
    "{convolution}": lambda match: str(2 * int(match[1]) + "01ab".index(match[2]) % 2),  # two in each stage
    "{fast_heads}": fast_heads,
    "{interleaved_rotary}": interleaved_rotary,
    "{level}": _level,
    "{position}": _position,
    "{qkv}": lambda match: f"attention.qkv#{'qkv'.index(match[1])}",
    "{rotary}": rotary,
}


@cache
def read_layouts() -> tuple[CheckpointLayout, ...]:
    """What `layouts.toml` beside this file describes."""

    def found(rows: list[list[str]]) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(_FUNCTIONS.get(cell, cell) for cell in row) for row in rows)

    tables = tomllib.loads(Path(__file__).with_name("layouts.toml").read_text(encoding="utf-8"))["layouts"]
    return tuple(
        CheckpointLayout(**table | {key: found(table.get(key, [])) for key in ("renames", "orders")})
        for table in tables
    )


# Conversion. Messages read on after the file's name.

# Which system a preset's network is of, by the beginning of the preset's name.
SYSTEMS = {"lightglue-": "LightGlue", "superglue-": "SuperGlue", "loftr-": "LoFTR"}
# Front ends whose network is ours, and what the layouts call them; in the others names are as published.
_FRONT_ENDS = {"superpoint": "SuperPoint", "superpoint-open": "SuperPoint-open"}
# A part of a name that tensors of this front end alone have.
_MARKS = {"aliked": "desc_head.", "disk": "unet.path_down", "xfeat": "heatmap_head."}


def import_checkpoint(
    path: str | Path, preset: str, output: str | Path, metadata: Mapping[str, str] | None = None
) -> str:
    """Convert a published checkpoint into a float32 file for `load(preset, weights=output)`; its sha256.

    One of LoFTR with optimal transport ("ot") makes a file of that variant; its header names it to `load`.
    """
    config = find_preset(preset).matcher
    system = next((name for start, name in SYSTEMS.items() if preset.startswith(start)), None)
    if system is None or not isinstance(config, NetworkConfig):
        raise UsageError(f"preset {preset!r} has no published checkpoints; {', '.join(SYSTEMS)}… have")
    tensors = read_checkpoint(path)
    if system == "LoFTR" and "coarse_matching.bin_score" in tensors:
        config = replace(config, assignment=LOFTR_TRANSPORT)
    with torch.random.fork_rng(devices=[]):
        model = MatchingNetwork(config).eval()
    _fill(model, path, tensors, system, heads=config.context.heads)
    return files.save_model(model, output, metadata, "float32")


def import_front_end(
    parts: Sequence[tuple[Path, str]],
    config: ExtractorConfig,
    output: str | Path,
    *,
    constants: tuple[str, ...] = (),
    metadata: Mapping[str, str] | None = None,
) -> str:
    """As `import_checkpoint`, of a front end, for `load(…, frontend_weights=output)`.

    `parts` are the published files, each with what our names have before the file's; `constants` are
    beginnings of names of ours that are in no file.
    """
    front_end, kind = find_front_end(config.kind), config.kind
    with torch.random.fork_rng(devices=[]):
        network = front_end.build(resolve(config, front_end.published)).eval()
    found = {part + name: tensor for path, part in parts for name, tensor in read_checkpoint(path).items()}
    where, system = ", ".join(str(path) for path, _ in parts), _FRONT_ENDS.get(kind, f"the front end {kind}")
    _fill(network, where, found, system, constants=constants)
    return files.save_front_end(network, kind, output, metadata)


def _fill(network: nn.Module, where: str | Path, tensors: dict[str, Tensor], system: str, **how: Any) -> None:
    try:
        layout = choose_layout(tensors, system)
        network.load_state_dict(convert(tensors, network.state_dict(), layout, **how))
    except IntegrityError as error:
        marked = [kind for kind, mark in _MARKS.items() if any(mark in name for name in tensors)]
        other = [f"is a checkpoint of the front end {kind} and " for kind in marked if kind not in system]
        raise IntegrityError(f"{where} {''.join(other[:1])}{error}") from error


def choose_layout(tensors: Mapping[str, Tensor], system: str) -> CheckpointLayout:
    """The layout of `system` that knows most of the tensors' names, which are ours where it has none."""
    ordered = sorted(read_layouts(), key=lambda layout: layout.system != system)  # on a tie the one asked for
    if ordered[0].system != system:
        return CheckpointLayout(system)
    known = {layout: sum(layout.ours(name) != name for name in tensors) for layout in ordered}
    best = max(ordered, key=known.get)
    if not known[best]:
        names = ", ".join(list(tensors)[:4])
        raise IntegrityError(
            f"is no checkpoint of {system}, nor of another matcher or SuperPoint; it holds {names}, …"
        )
    if best.system != system:
        raise IntegrityError(f"is a checkpoint of {best.system}, not of {system}")
    return best


def convert(
    tensors: Mapping[str, Tensor],
    expected: dict[str, Tensor],
    layout: CheckpointLayout,
    *,
    heads: int = 1,
    constants: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Their tensors as ours: all `expected` ones, but for `constants` and counters that are in no file."""
    parts: dict[str, dict[str, Tensor]] = {}  # of each of ours
    made: dict[str, Tensor] = {}
    try:
        for theirs, tensor in tensors.items():
            name, _, rest = layout.ours(theirs).partition("#")
            part, dot, leaf = rest.partition(".")
            ours, value = name + dot + leaf, tensor
            for place, rows, columns in layout.orders:
                if rows and re.search(place, theirs):
                    value = value[rows(len(value), heads)]
                if columns and re.search(place, theirs) and value.dim() > 1:
                    value = value[:, columns(value.shape[1], heads)]
            if not re.fullmatch(layout.ignored, theirs):  # one that is not known is told by their name
                own = parts.setdefault(ours if ours in expected else theirs, {})
                if part in own:
                    raise IntegrityError(f"holds {ours} twice, under two names")
                own[part] = value
        for ours, own in parts.items():
            if any(part.endswith("=") and not torch.equal(own[part], own[part[:-1]]) for part in own):
                raise IntegrityError(f"does not hold one projection for both in {ours}")
            joined = [own[part] for part in sorted(own) if not part.endswith("=")]
            value, wanted = torch.cat(joined) if len(joined) > 1 else joined[0], expected.get(ours)
            # Sides of length 1 are no difference: a convolution over points is a linear map.
            if wanted is not None and value.squeeze().shape == wanted.squeeze().shape:
                value = value.reshape(wanted.shape).to(wanted.dtype)
            made[ours] = value.clone(memory_format=torch.contiguous_format)
    except (RuntimeError, IndexError, KeyError) as error:
        raise IntegrityError(f"does not hold the tensors that {layout.system} asks for ({error})") from error
    # Counters are of batch norms: older files lack them, and nothing reads them.
    optional = {n for n in expected if n.startswith(constants) or n.endswith("num_batches_tracked")}
    needed = {name: t for name, t in expected.items() if name in made or name not in optional}
    return expected | files.checked(made, needed, f"{layout.system} asks for")


# One file over HTTP, whole or not at all: resumed where it broke, checked while it streams.

Report = Callable[[int, int], None]  # bytes so far, bytes in all or 0


class _Refused(Exception):
    """What an address gave cannot be used; the next one may."""


class _Broken(Exception):
    """The connection ended early; what came is kept for the next attempt."""


def download(
    urls: Sequence[str], path: Path, sha256: str = "", size: int = 0, report: Report | None = None
) -> str:
    """Fetch a file, of a hash and size if these are known, from one of its addresses; its sha256."""
    failures, attempts = [], 3  # at one address, each of which resumes
    for url in urls:
        part = path.with_name(f"{path.name}.{hashlib.sha256(url.encode()).hexdigest()[:8]}.part")
        for attempt in range(attempts):
            try:
                digest = _transfer(url, part, sha256, size, report)
            except _Broken as error:
                if attempt == attempts - 1:
                    kept = "; what came is kept, run the command again" if sha256 and part.is_file() else ""
                    failures.append(f"{url}: {error}{kept}")
            except _Refused as error:
                part.unlink(missing_ok=True)
                failures.append(f"{url}: {error}")
                break
            else:
                part.replace(path)
                for rest in path.parent.glob(f"{path.name}.*.part"):  # of other addresses
                    rest.unlink()
                return digest
    raise IntegrityError(f"{path.name} could not be fetched. " + "; ".join(failures))


def _transfer(url: str, part: Path, sha256: str, size: int, report: Report | None) -> str:
    """Append what is missing to `part` (anew without a hash, which shows if both halves are of one file)."""
    request = Request(url, headers={"User-Agent": "matcher", "Accept-Encoding": "identity"})
    have = part.stat().st_size if part.is_file() and sha256 else 0
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = build_opener().open(request, timeout=60)  # reads the proxy variables as they are now
    except HTTPError as error:
        error.close()
        if error.code == 416:  # what is here is not the beginning of what is there
            part.unlink()
            raise _Broken("the file there has changed") from error
        raise _Refused(f"the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Broken(f"no connection ({getattr(error, 'reason', None) or error})") from error
    with response, part.open("r+b" if part.exists() else "w+b") as file:
        if "text/html" in response.headers.get("Content-Type", ""):
            raise _Refused("the server answered with a web page instead of the file")
        start = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
        if response.status != 206:
            have = 0
        elif start is None or int(start[1]) != have:
            raise _Refused("the server sent another part than requested")
        file.truncate(have)
        length = response.headers.get("Content-Length", "")
        total = have + int(length) if length.isdigit() else 0
        if size and total and total != size:
            raise _Refused(f"the file there has {total} bytes instead of {size}")
        digest, chunk, most = hashlib.file_digest(file, "sha256"), b"\0", size or total or LARGEST_WEIGHTS
        try:
            while chunk:
                try:
                    chunk = response.read(1 << 18)
                except (OSError, http.client.HTTPException) as error:
                    raise _Broken(f"the connection broke ({error})") from error
                file.write(chunk)
                digest.update(chunk)
                came = file.tell()
                if came > most:  # a server may send without an end
                    raise _Refused(f"what comes has more than {most} bytes")
                if report is not None:
                    report(came, total)
        finally:
            file.flush()
            os.fsync(file.fileno())
        if came < total:
            raise _Broken(f"the connection ended after {came} of {total} bytes")
        file.seek(0)
        if fault := page_fault(file.read(512)):
            raise _Refused(f"what came {fault}")
    digest = digest.hexdigest()
    if size not in (0, came) or sha256 not in ("", digest):
        raise _Refused(f"what came has {came} bytes and sha256 {digest}, not {size or came} and {sha256}")
    return digest


@dataclass(frozen=True)
class Fetched:
    """Published weights on this machine."""

    path: Path  # what `load(weights=…)` or `load(frontend_weights=…)` takes
    sha256: dict[str, str]  # of the published files by name; empty when the weights were here already


def fetch(
    row: Published,
    *,
    accept_licence: bool = False,
    accept_unverified: bool = False,
    report: Report | None = None,
) -> Fetched:
    """Download published weights to the cache, check them, and convert them; others wait that want the same.

    A licence not for commercial use must be accepted (`UsageError`), and files whose SHA-256 nobody states.
    """
    with suppress(IntegrityError):
        return Fetched(files.locate(row).path, {})
    if os.environ.get("MATCHER_OFFLINE", "0") not in ("", "0"):
        raise UsageError(f"MATCHER_OFFLINE is set, so {row.name} is not fetched: unset it, or import a file")
    if not row.commercial and not accept_licence:
        raise UsageError(
            f"{row.name} is not for commercial use ({row.licence}; {row.source}): if that suits you, run"
            f" `{row.command}`"
        )
    with locked(row):
        with suppress(IntegrityError):
            return Fetched(files.locate(row).path, {})
        unknown = [file for file in row.files if not file.sha256]
        if unknown and not accept_unverified:
            raise UsageError(
                f"{' and '.join(file.name for file in unknown)} cannot be verified: no SHA-256 is known that"
                f" the download from {', '.join(file.urls[0] for file in unknown)} should have, so nothing"
                f" was downloaded. If you trust it, run `{row.command} --accept-unverified`; or download it"
                f" yourself, check it, and run `matcher weights import FILE --preset {row.name}`"
            )
        paths = [row.folder / file.name for file in row.files]
        digests = [_sha256(path) if path.is_file() else "" for path in paths]  # of an earlier call
        for number, (file, path) in enumerate(zip(row.files, paths, strict=True)):
            if digests[number] != (file.sha256 or digests[number] or "unknown"):
                digests[number] = download(file.urls, path, file.sha256, file.bytes, report)
        try:
            path = _make_ready(row, paths, digests)
        except IntegrityError:
            for came in paths:  # they would fail again in the same way
                came.unlink(missing_ok=True)
            raise
    return Fetched(path, {path.name: digest for path, digest in zip(paths, digests, strict=True)})


def import_files(paths: Sequence[Path], name: str, output: Path | None = None) -> Path:
    """Convert checkpoints that the user has, of a name in the catalogue and in its order; the file's path,
    by default where `load` looks in the cache."""
    row = find_published(name)
    if len(paths) != len(row.files):
        wanted = ", ".join(file.name for file in row.files)
        raise UsageError(f"{name} is made of {len(row.files)} files ({wanted}), not of {len(paths)}")
    digests = [_sha256(path) if path.is_file() else "" for path in paths]
    strange = {*digests} - {"", *(file.sha256 for file in row.files)}
    for other in files.read_catalogue().values():  # whose tensors may have the same names and shapes
        if foreign := strange & {file.sha256 for file in other.files}:
            path = paths[digests.index(min(foreign))]
            raise UsageError(f"{path} is of {other.name}, not of {row.name}: give preset={other.name!r}")
    if output is not None:
        _convert(row, paths, output)
        return output
    with locked(row):
        return _make_ready(row, paths, digests)


def _make_ready(row: Published, paths: Sequence[Path], digests: Sequence[str]) -> Path:
    """Convert, and write the manifest last: it marks the files as complete."""
    path = row.folder / f"{row.name}.safetensors"
    made = _convert(row, paths, path)
    origin = (f"{p.name} sha256 {digest}" for p, digest in zip(paths, digests, strict=True))
    entry = files.WeightsRow(
        name=row.name,
        file=path.name,
        sha256=made,
        bytes=path.stat().st_size,
        preset=row.preset,
        licence=row.licence,
        source=f"{row.source}; {', '.join(origin)}",
        trained_on=row.paper,
        metrics="none measured here",
    )
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in asdict(entry).items()]
    write_whole(row.folder / "manifest.toml", "\n".join(["[[weights]]", *lines, ""]).encode())
    return path


def _convert(row: Published, paths: Sequence[Path], output: Path) -> str:
    metadata = {"licence": row.licence, "source": row.source}
    if row.preset:
        return import_checkpoint(paths[0], row.preset, output, metadata)
    parts = [(path, file.part) for path, file in zip(paths, row.files, strict=True)]
    config = ExtractorConfig(kind=row.frontend, variant=row.variant or None)
    return import_front_end(parts, config, output, constants=row.constants, metadata=metadata)


def _sha256(path: Path) -> str:
    with open_given(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST_WEIGHTS:
            raise IntegrityError(f"{path} is larger than {LARGEST_WEIGHTS >> 30} GB: it is no checkpoint")
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(row: Published) -> Iterator[None]:
    """Hold a lock between processes on a row's folder, which ends with its process."""
    try:
        row.folder.mkdir(parents=True, exist_ok=True)
        lock = sqlite3.connect(row.folder / ".lock", timeout=0.2, isolation_level=None)
        while not lock.in_transaction:
            try:
                lock.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise
    except (OSError, sqlite3.Error) as error:
        raise UsageError(
            f"{row.folder} cannot be written ({error}): name another cache in MATCHER_CACHE"
        ) from error
    with closing(lock):
        yield
