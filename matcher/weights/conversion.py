"""Published checkpoints into weights files of ours, strictly and without running any code in them.

A checkpoint is read to tensors by name, and the layout that knows most of the names says what they are here.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from matcher.config import ExtractorConfig, NetworkConfig, resolve
from matcher.errors import IntegrityError, UsageError
from matcher.extract.extractor import find_front_end
from matcher.match.network import MatchingNetwork
from matcher.presets import LOFTR_TRANSPORT, find_preset
from matcher.weights.files import checked, read_bytes, read_header, read_tensors, save_front_end, save_model

# Reading.

SUFFIXES = (".pth", ".ckpt", ".pt", ".bin", ".safetensors")
# Keys under which training checkpoints keep the network, beside the optimiser and the rest.
_CONTAINERS = ("state_dict", "model", "model_state_dict", "extractor", "disk", "net")


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, without the prefixes `matcher.` and `module.`.

    Args:
        path: safetensors, or a file of `torch.save` (.pth, .pt, .ckpt, .bin), of which only tensors are read
            and no code runs.

    Raises:
        UsageError: another suffix.
        IntegrityError: the file is absent, cut short, a web page, holds code or other objects, or no tensors.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: a checkpoint ends in {', '.join(SUFFIXES)}")
    data = read_bytes(path, "check the path")
    if fault := page_fault(data[:512]):
        raise IntegrityError(f"{path} {fault}")
    if path.suffix.lower() == ".safetensors":
        try:
            found, metadata = read_tensors(data), read_header(data)
        except IntegrityError as error:
            raise IntegrityError(f"{path} {error}: fetch it again") from error
        if "config" in metadata:
            raise UsageError(f"{path} is one of this package's weights files already: give it as weights")
    else:
        found = _find_tensors(path, _unpickle(path, data))
    stripped: dict[str, Tensor] = {}
    for name, tensor in found.items():
        short = re.sub(r"^((matcher|module)\.)+", "", name)
        if short in stripped:
            raise IntegrityError(f"{path} holds {short} twice, with and without a prefix: use another file")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex():
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


def _unpickle(path: Path, data: bytes) -> Any:
    if data[:2] != b"PK" and data[:1] != b"\x80":
        raise IntegrityError(f"{path} is not a file of torch.save, or is damaged: fetch it again")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # of what a damaged archive makes torch raise there is no list
        reason = " ".join(f"{type(error).__name__} {error}".split())
        if found := re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", reason):
            raise IntegrityError(
                f"{path} holds more than tensors ({found[1].rstrip('.,')}), which could run code, so it was"
                " not opened. Save its tensors alone, torch.save({name: tensor}), where that is safe"
            ) from error
        raise IntegrityError(f"{path} is damaged or cut short ({reason[-160:]}): fetch it again") from error


def _find_tensors(path: Path, content: Any, depth: int = 0) -> dict[str, Tensor]:
    """The state dict itself, or the one under a known key of a training checkpoint."""
    if isinstance(content, dict):
        for key in _CONTAINERS if depth < 3 else ():
            if isinstance(content.get(key), dict):
                return _find_tensors(path, content[key], depth + 1)
        tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
        if tensors and all(isinstance(name, str) for name in tensors):
            return tensors
    keys = ", ".join(map(str, list(content)[:8])) if isinstance(content, dict) else type(content).__name__
    raise IntegrityError(
        f"{path} holds no network's tensors (it holds {keys or 'nothing'}): use another file"
    )


# Orders of channels: (channels, heads) → for each channel of ours, which one of theirs it is.

Order = Callable[[int, int], Tensor]


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


# What published tensors are called here, in every naming that is in use.


class CheckpointLayout(NamedTuple):
    """How the parameters of a system are named and ordered.

    Renames are regular expressions, all applied in turn. `name#0`, `name#1` … are parts of one parameter, one
    below the other; `name#0=` must repeat part 0. Orders are of rows and of columns, by a part of their name.
    """

    system: str
    renames: tuple[tuple[str, str | Callable[[re.Match], str]], ...] = ()
    orders: tuple[tuple[str, Order | None, Order | None], ...] = ()
    ignored: str = r"(?!)"  # names of what is in the files and no parameter of the network; none by default

    def ours(self, name: str) -> str:
        """Our name for a tensor of theirs; their own where no rename fits."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def coverage(self, names: Iterable[str]) -> int:
        """How many of these names it knows."""
        return sum(self.ours(name) != name for name in names)


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


def _qkv(match: re.Match) -> str:
    return f"attention.qkv#{'qkv'.index(match[1])}"


LAYOUTS = (
    CheckpointLayout(
        "LightGlue",
        (
            # cvg/LightGlue's files have the names of the first line; glue-factory and kornia save the second.
            (r"^(self|cross)_attn\.(\d+)", r"layers.\2.\1_block"),
            (r"^transformers\.(\d+)\.(self|cross)_attn", r"layers.\1.\2_block"),
            (r"(?<=_block\.)Wqkv", "attention.qkv"),
            (r"(?<=_block\.)to_qk", "attention.qkv#0"),
            (r"(?<=_block\.)to_v", "attention.qkv#1"),
            # transformers
            (r"^transformer_layers\.(\d+)\.(self|cross)_(attention|mlp)", r"layers.\1.\2_block"),
            (r"(?<=self_block\.)([qkv])_proj", _qkv),
            (r"(?<=cross_block\.)q_proj", "attention.qkv#0"),
            (r"(?<=cross_block\.)k_proj", "attention.qkv#0="),
            (r"(?<=cross_block\.)v_proj", "attention.qkv#1"),
            # All of them.
            (r"(?<=_block\.)(out_proj|to_out|o_proj)", "attention.out"),
            (r"(?<=_block\.)(ffn\.0|fc1)", "ffn.widen"),
            (r"(?<=_block\.)(ffn\.1|layer_norm)", "ffn.norm"),
            (r"(?<=_block\.)(ffn\.3|fc2)", "ffn.narrow"),
            (r"^(log_assignment|match_assignment_layers)\.(\d+)", r"heads.\2"),
            (r"^heads\.(\d+)\.final_proj(ection)?", r"heads.\1.projection"),
            (r"^token_confidence\.(\d+)\.token(\.0)?", r"confidence.\1"),
            (r"^input_proj(ection)?\b", "project"),
            (r"^(posenc\.Wr|positional_encoder\.projector)", "position.frequencies"),
        ),
        (
            ("self_attn.*Wqkv", interleaved_rotary, None),
            (r"self_attention\.[qk]_proj", rotary, None),
        ),
        # log_assignment.N.r: scalars of 1 in disk_lightglue.pth that no published code reads.
        r"confidence_thresholds|(extractor|keypoint_detector)\..*|log_assignment\.[0-9]+\.r",
    ),
    CheckpointLayout(  # magicleap/SuperGluePretrainedNetwork
        "SuperGlue",
        (
            (r"^gnn\.layers\.(?P<layer>\d{1,3})", _alternating),
            (r"(?<=_block\.)attn\.proj\.", "attention.qkv#"),
            (r"(?<=_block\.)attn\.merge", "attention.out"),
            (r"(?<=_block\.)mlp\.0", "ffn.widen"),
            (r"(?<=_block\.)mlp\.1", "ffn.norm"),
            (r"(?<=_block\.)mlp\.3", "ffn.narrow"),
            (r"^kenc\.encoder\.(\d{1,3})", _position),
            (r"^final_proj\b", "heads.0.projection"),
            (r"^bin_score", "heads.0.dustbin"),
        ),
        ((r"attn\.proj", fast_heads, None), (r"attn\.merge", None, fast_heads)),
    ),
    CheckpointLayout(  # transformers
        "SuperGlue",
        (
            (r"^gnn\.layers\.(?P<layer>\d{1,3})", _alternating),
            (r"(?<=_block\.)attention\.self\.([qkv])[a-z]*", _qkv),
            (r"(?<=_block\.)attention\.output\.dense", "attention.out"),
            (r"(?<=_block\.)mlp\.0\.linear", "ffn.widen"),
            (r"(?<=_block\.)mlp\.0\.batch_norm", "ffn.norm"),
            (r"(?<=_block\.)mlp\.1", "ffn.narrow"),
            (r"^keypoint_encoder\.encoder\.4\b", "position.out"),
            (r"^keypoint_encoder\.encoder\.(\d+)\.(?:batch_)?(linear|norm)", r"position.hidden.\1.\2"),
            (r"^final_projection\.final_proj", "heads.0.projection"),
            (r"^bin_score", "heads.0.dustbin"),
        ),
        ignored=r"keypoint_detector\..*",
    ),
    CheckpointLayout(  # zju3dv/LoFTR and kornia
        "LoFTR",
        (
            (r"^backbone\.conv1", "backbone.stem.conv"),
            (r"^backbone\.bn1", "backbone.stem.norm"),
            (r"^backbone\.layer(\d)(_outconv(?:2\.(\d+))?)?", _level),
            (r"(?<=^backbone\.stages\.\d\.\d)\.(conv|bn)1", r".first.\1"),
            (r"(?<=^backbone\.stages\.\d\.\d)\.(conv|bn)2", r".second.\1"),
            (r"(?<=^backbone\.stages\.\d\.\d)\.downsample\.0", ".skip.conv"),
            (r"(?<=^backbone\.stages\.\d\.\d)\.downsample\.1", ".skip.norm"),
            (r"(?<=^backbone\.stages\.\d\.\d\.)(first|second)\.bn", r"\1.norm"),
            (r"^loftr_fine\.", "fine.loftr_coarse."),
            (r"(?:^|(?<=^fine\.))loftr_coarse\.layers\.(?P<layer>\d{1,3})", _alternating),
            (r"(?<=_block\.)([qkv])_proj", _qkv),
            (r"(?<=_block\.)merge", "attention.out"),
            (r"(?<=_block\.)norm1", "message_norm"),
            (r"(?<=_block\.)mlp\.0", "ffn.widen"),
            (r"(?<=_block\.)mlp\.2", "ffn.narrow"),
            (r"(?<=_block\.)norm2", "ffn.output_norm"),
            (r"^coarse_matching\.bin_score", "heads.0.dustbin"),
            (r"^fine_preprocess\.down_proj", "fine.reduce"),
            (r"^fine_preprocess\.merge_feat", "fine.merge"),
        ),
    ),
    CheckpointLayout(
        "SuperPoint",
        (
            # magicleap/SuperPointPretrainedNetwork
            (r"^conv([1-4])([ab])", lambda of: f"encoder.{int(of[1]) - 1}{of[2]}"),  # counted from 1
            (r"^conv(P)([ab])|^keypoint_decoder\.conv_(score)_([ab])", r"points.0\2\4"),
            (r"^conv(D)([ab])|^descriptor_decoder\.conv_(descriptor)_([ab])", r"descriptors.0\2\4"),
            # transformers
            (r"^encoder\.conv_blocks\.(\d)\.conv_([ab])", r"encoder.\1\2"),
            (r"(?<=\.)(\d)([ab])\b", lambda of: f"{2 * int(of[1]) + 'ab'.index(of[2])}.conv"),
        ),
    ),
    CheckpointLayout(  # rpautrat/SuperPoint
        "SuperPoint-open",
        (
            (r"^backbone\.(\d)\.(\d)", lambda of: f"encoder.{2 * int(of[1]) + int(of[2])}"),
            (r"^detector\.", "points."),
            (r"^descriptor\.", "descriptors."),
            (r"(?<=\d\.)bn\b", "norm"),
        ),
    ),
)
COUNTER = "num_batches_tracked"  # of batch norms: older files lack it, and nothing reads it


# Conversion.

# Which system a preset's network is of, by the beginning of the preset's name.
SYSTEMS = {"lightglue-": "LightGlue", "superglue-": "SuperGlue", "loftr-": "LoFTR"}
# Front ends whose network is ours, and what the layouts call them; in the others names are as published.
_FRONT_ENDS = {"superpoint": "SuperPoint", "superpoint-open": "SuperPoint-open"}
# A part of a name that tensors of this front end alone have.
_MARKS = {"aliked": "desc_head.", "disk": "unet.path_down", "xfeat": "heatmap_head."}


def import_checkpoint(
    path: str | Path, preset: str, output: str | Path, metadata: Mapping[str, str] | None = None
) -> str:
    """Convert a published checkpoint into a weights file that `load(preset, weights=output)` takes.

    One of LoFTR with optimal transport ("ot") makes a file of that variant; its header names it to `load`.

    Args:
        path: the checkpoint, in one of `LAYOUTS`.
        preset: whose network it is.
        output: of the new safetensors file, float32; an existing one is replaced.
        metadata: further header entries.

    Returns:
        The sha256 of the new file.

    Raises:
        UsageError: a preset that has no published checkpoints, or a suffix that is not known.
        IntegrityError: the file cannot be read or its tensors are not those of the preset's network.
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
    return save_model(model, output, metadata, dtype=torch.float32)


def import_front_end(
    parts: Sequence[tuple[Path, str]],
    config: ExtractorConfig,
    output: str | Path,
    *,
    constants: tuple[str, ...] = (),
    metadata: Mapping[str, str] | None = None,
) -> str:
    """As `import_checkpoint`, of a front end, for `load(…, frontend_weights=output)`.

    Args:
        parts: the published files, each with what our names have before the file's.
        config: its kind and variant choose the network.
        output, metadata: as there.
        constants: beginnings of names of ours that are in no file.
    """
    front_end, kind = find_front_end(config.kind), config.kind
    with torch.random.fork_rng(devices=[]):
        network = front_end.build(resolve(config, front_end.published)).eval()
    found = {part + name: tensor for path, part in parts for name, tensor in read_checkpoint(path).items()}
    files, system = ", ".join(str(path) for path, _ in parts), _FRONT_ENDS.get(kind, f"the front end {kind}")
    _fill(network, files, found, system, constants=constants)
    return save_front_end(network, kind, output, metadata)


def _fill(network: nn.Module, files: str | Path, tensors: dict[str, Tensor], system: str, **how: Any) -> None:
    """Put the tensors of published files into a network of ours, all of them or none; `how`: of `convert`."""
    try:
        layout = choose_layout(tensors, system)
        network.load_state_dict(convert(tensors, network.state_dict(), layout, **how))
    except IntegrityError as error:
        marked = [kind for kind, mark in _MARKS.items() if any(mark in name for name in tensors)]
        other = [f"is a checkpoint of the front end {kind} and " for kind in marked if kind not in system]
        raise IntegrityError(f"{files} {''.join(other[:1])}{error}") from error


def choose_layout(tensors: Mapping[str, Tensor], system: str) -> CheckpointLayout:
    """The layout of `system` that knows most of the tensors' names, which are ours where it has none.

    Raises:
        IntegrityError: another system's layout knows more of them, or none knows any; reads on after the
            file's name.
    """
    ordered = sorted(LAYOUTS, key=lambda layout: layout.system != system)  # on a tie the one asked for
    if ordered[0].system != system:
        return CheckpointLayout(system)
    best = max(ordered, key=lambda layout: layout.coverage(tensors))
    if not best.coverage(tensors):
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
    """Their tensors as ours: all that are `expected`, but for `constants` and counters that are in no file.

    Raises:
        IntegrityError: missing, extra, misshaped or not finite tensors; reads on after the file's name.
    """
    parts: dict[str, dict[str, Tensor]] = {}  # of each of ours
    made: dict[str, Tensor] = {}
    try:
        for theirs, tensor in tensors.items():
            name, _, rest = layout.ours(theirs).partition("#")
            part, dot, leaf = rest.partition(".")
            ours, value = name + dot + leaf, tensor
            for place, rows, columns in layout.orders:
                if rows is not None and re.search(place, theirs):
                    value = value[rows(len(value), heads)]
                if columns is not None and re.search(place, theirs) and value.dim() > 1:
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
    absent = {name for name in expected if name.startswith(constants) or name.endswith(COUNTER)} - made.keys()
    needed = {name: tensor for name, tensor in expected.items() if name not in absent}
    return expected | checked(made, needed, f"{layout.system} asks for")
