"""Published checkpoints into weights files of ours, strictly and without running any code in them.

A checkpoint is read to tensors by name, the layout that knows most of the names is chosen, and its table says
which of them make each parameter of ours.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from torch import Tensor, nn

from matcher.config import AssignmentConfig, ExtractorConfig, NetworkConfig, resolve
from matcher.errors import IntegrityError, UsageError
from matcher.extract.extractor import find_front_end
from matcher.match.network import MatchingNetwork
from matcher.presets import LOFTR_TRANSPORT, find_preset
from matcher.weights.files import checked, read_bytes, save_front_end, save_model

# Reading.

SUFFIXES = (".pth", ".ckpt", ".pt", ".bin", ".safetensors")
PREFIXES = ("matcher.", "module.")
# Keys under which training checkpoints keep the network, beside the optimiser and the rest.
_CONTAINERS = ("state_dict", "model", "model_state_dict", "extractor", "disk", "net")
_PAGES = (b"<!doctype", b"<html", b"<?xml", b"<head")


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
        found = _read_safetensors(path, data)
    else:
        found = _find_tensors(path, _unpickle(path, data))
    stripped: dict[str, Tensor] = {}
    for name, tensor in found.items():
        short = name
        while short.startswith(PREFIXES):
            short = short.split(".", 1)[1]
        if short in stripped:
            raise IntegrityError(f"{path} holds {short} twice, with and without a prefix: use another file")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex():
            raise IntegrityError(f"{path} holds {name} in a form that is not plain numbers: use another file")
        stripped[short] = tensor.detach()
    return stripped


def page_fault(start: bytes) -> str | None:
    """What a file is if it is no checkpoint at all, from its first bytes; None when it may be one."""
    start = start.lstrip()
    if start[:16].lower().startswith(_PAGES):
        return "is a web page, not a checkpoint: the link led to a page about the file; fetch the file itself"
    if start.startswith(b"version https://git-lfs"):
        return "is a git-lfs pointer, not the file itself: run `git lfs pull`"
    return None if start else "is empty: fetch it again"


def _read_safetensors(path: Path, data: bytes) -> dict[str, Tensor]:
    try:
        tensors = parse_tensors(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ValueError, KeyError) as error:
        raise IntegrityError(f"{path} is not an intact safetensors file ({error}): fetch it again") from error
    if "config" in header.get("__metadata__", {}):
        raise UsageError(
            f"{path} is one of this package's weights files already; give it as weights={path.name}"
        )
    return tensors


def _unpickle(path: Path, data: bytes) -> Any:
    if data[:2] != b"PK" and data[:1] != b"\x80":
        raise IntegrityError(f"{path} is not a file of torch.save, or is damaged: fetch it again")
    if data[:2] == b"PK" and not zipfile.is_zipfile(io.BytesIO(data)):
        raise IntegrityError(f"{path} is cut short: fetch it again")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = " ".join(str(error).split())
        for mark in ("Unsupported global: GLOBAL ", "Unsupported class "):
            if mark in reason:
                name = reason.split(mark)[1].split()[0].rstrip(".,")
                raise IntegrityError(
                    f"{path} holds more than tensors ({name}), which could run code, so it was not opened."
                    " Save its tensors alone, torch.save({name: tensor}), where that is safe, or use another"
                    " copy"
                ) from error
        raise IntegrityError(
            f"{path} is damaged or holds more than tensors ({reason[-160:]}): fetch it again"
        ) from error
    except Exception as error:  # of what a damaged archive makes torch raise there is no list
        reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise IntegrityError(f"{path} is damaged or cut short ({reason}): fetch it again") from error


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


def _halves(width: int) -> Tensor:
    """Neighbouring channels that turn together, (0, 1), (2, 3), …, as ours: c with c + width/2."""
    return torch.arange(width).view(-1, 2).t().flatten()


def interleaved_rotary(channels: int, heads: int) -> Tensor:
    """LightGlue's fused projection, rows (head, channel, q k v) → ours, q k v of whole heads, halves."""
    index = torch.arange(channels).view(heads, -1, 3).permute(2, 0, 1)  # (3, heads, width)
    return torch.cat([index[:2, :, _halves(index.shape[2])].flatten(), index[2].flatten()])


def stacked_rotary(channels: int, heads: int) -> Tensor:
    """As `interleaved_rotary`, of q, k and v that are already apart."""
    index = torch.arange(channels).view(3, heads, -1)
    return torch.cat([index[:2, :, _halves(index.shape[2])].flatten(), index[2].flatten()])


def fast_heads(channels: int, heads: int) -> Tensor:
    """SuperGlue's q, k and v, in which channel d of head h lies at d·heads + h → whole heads."""
    return torch.arange(channels).view(3, -1, heads).transpose(1, 2).flatten()


def fast_heads_merged(channels: int, heads: int) -> Tensor:
    """As `fast_heads`, of the single vector that comes out of attention."""
    return torch.arange(channels).view(-1, heads).t().flatten()


# Tables: which tensors of a published checkpoint are which parameter of ours, one for each layout in use.

_LEAF = r"(?:\.(?:weight|bias|running_mean|running_var|num_batches_tracked))?"
COUNTER = "num_batches_tracked"  # of batch norms: older files lack it, and nothing reads it


class TensorRule(NamedTuple):
    """One line of a table: a module, or a lone parameter, of ours and what makes it.

    Weights, biases and running statistics follow their module. `{n}` is a number of ours; in theirs `{even}`
    is 2n, `{odd}` 2n + 1, `{first}` 3n and `{second}` 3n + 1.
    """

    ours: str
    theirs: str  # names joined by " + " when several tensors, one below the other, are one of ours
    rows: Order | None = None  # order of the output channels
    columns: Order | None = None  # order of a weight's input channels
    copy: str = ""  # a tensor that must repeat the first of `theirs`

    def source(self, ours: str) -> TensorSource | None:
        """What makes the parameter `ours`; None if this line is not about it."""
        pattern = re.escape(self.ours).replace(re.escape("{n}"), "(?P<n>[0-9]+)")
        match = re.fullmatch(f"{pattern}(?P<leaf>{_LEAF})", ours)
        if match is None:
            return None
        n, leaf = int(match.groupdict().get("n", 0)), match["leaf"]
        numbers = {"n": n, "even": 2 * n, "odd": 2 * n + 1, "first": 3 * n, "second": 3 * n + 1}
        names = tuple(part.format(**numbers) + leaf for part in self.theirs.split(" + "))
        copy = self.copy.format(**numbers) + leaf if self.copy else ""
        return TensorSource(names, copy, self.rows, self.columns)


class TensorSource(NamedTuple):
    """Which tensors of theirs, one below the other, make a parameter of ours."""

    names: tuple[str, ...]
    copy: str = ""
    rows: Order | None = None
    columns: Order | None = None


@dataclass(frozen=True)
class CheckpointLayout:
    """How one implementation names and orders the parameters of a system."""

    system: str
    name: str
    rules: tuple[TensorRule, ...]
    renames: tuple[tuple[str, str], ...] = ()  # regular expressions that make newer names old ones
    ignored: str = r"(?!)"  # names of what is in the files and no parameter of the network; none by default

    def tidy(self, name: str) -> str:
        """A name of theirs as the table has it."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def coverage(self, names: Iterable[str]) -> int:
        """How many of these names the table knows."""
        known = [part for rule in self.rules for part in (*rule.theirs.split(" + "), rule.copy) if part]
        parts = [re.sub(r"\\{\w+\\}", "[0-9]+", re.escape(part)) + _LEAF for part in known]
        pattern = re.compile("|".join(f"(?:{part})" for part in parts))
        return sum(pattern.fullmatch(self.tidy(name)) is not None for name in names)

    def find(self, ours: str) -> TensorSource:
        """What makes a parameter of ours; a tensor of the same name when no line knows it."""
        found = (rule.source(ours) for rule in self.rules)
        return next((source for source in found if source is not None), TensorSource((ours,)))


def _rules(*rows: tuple[Any, ...] | TensorRule) -> tuple[TensorRule, ...]:
    """Lines of a table; one with `[block]` stands for two, of self- and of cross-attention, whose layers are
    the even and the odd ones where the line says `[layer]`."""
    made = []
    for rule in (TensorRule(*row) for row in rows):
        blocks = (("self", "{even}"), ("cross", "{odd}")) if "[block]" in rule.ours else (("", ""),)
        for block, layer in blocks:
            texts = (
                text.replace("[block]", block).replace("[layer]", layer) for text in (rule.ours, rule.theirs)
            )
            made.append(TensorRule(*texts, rule.rows, rule.columns, rule.copy))
    return tuple(made)


def _joined(template: str, *parts: str) -> str:
    return " + ".join(template.format(part) for part in parts)


_OF_BLOCK = "layers.{n}.[block]_block."


def _of_lightglue() -> Iterator[CheckpointLayout]:
    """Of LightGlue."""
    yield CheckpointLayout(
        "LightGlue",
        "as cvg/LightGlue and kornia have it",
        _rules(
            ("project", "input_proj"),
            ("position.frequencies", "posenc.Wr"),
            ("layers.{n}.self_block.attention.qkv", "self_attn.{n}.Wqkv", interleaved_rotary),
            ("layers.{n}.self_block.attention.out", "self_attn.{n}.out_proj"),
            ("layers.{n}.cross_block.attention.qkv", "cross_attn.{n}.to_qk + cross_attn.{n}.to_v"),
            ("layers.{n}.cross_block.attention.out", "cross_attn.{n}.to_out"),
            (f"{_OF_BLOCK}ffn.widen", "[block]_attn.{n}.ffn.0"),
            (f"{_OF_BLOCK}ffn.norm", "[block]_attn.{n}.ffn.1"),
            (f"{_OF_BLOCK}ffn.narrow", "[block]_attn.{n}.ffn.3"),
            ("heads.{n}.projection", "log_assignment.{n}.final_proj"),
            ("heads.{n}.matchability", "log_assignment.{n}.matchability"),
            ("confidence.{n}", "token_confidence.{n}.token.0"),
        ),
        # The released files have the old names; glue-factory and kornia save the new ones.
        renames=((r"^transformers\.([0-9]+)\.(self|cross)_attn\.", r"\2_attn.\1."),),
        # log_assignment.N.r: scalars of 1 in disk_lightglue.pth that no published code reads.
        ignored=r"confidence_thresholds|extractor\..*|log_assignment\.[0-9]+\.r",
    )
    yield CheckpointLayout(
        "LightGlue",
        "as transformers has it",
        _rules(
            ("project", "input_projection"),
            ("position.frequencies", "positional_encoder.projector"),
            (
                "layers.{n}.self_block.attention.qkv",
                _joined("transformer_layers.{{n}}.self_attention.{}", "q_proj", "k_proj", "v_proj"),
                stacked_rotary,
            ),
            TensorRule(
                "layers.{n}.cross_block.attention.qkv",
                _joined("transformer_layers.{{n}}.cross_attention.{}", "q_proj", "v_proj"),
                copy="transformer_layers.{n}.cross_attention.k_proj",
            ),
            (f"{_OF_BLOCK}attention.out", "transformer_layers.{n}.[block]_attention.o_proj"),
            (f"{_OF_BLOCK}ffn.widen", "transformer_layers.{n}.[block]_mlp.fc1"),
            (f"{_OF_BLOCK}ffn.norm", "transformer_layers.{n}.[block]_mlp.layer_norm"),
            (f"{_OF_BLOCK}ffn.narrow", "transformer_layers.{n}.[block]_mlp.fc2"),
            ("heads.{n}.projection", "match_assignment_layers.{n}.final_projection"),
            ("heads.{n}.matchability", "match_assignment_layers.{n}.matchability"),
            ("confidence.{n}", "token_confidence.{n}.token"),
        ),
        ignored=r"keypoint_detector\..*",
    )


def _of_superglue() -> Iterator[CheckpointLayout]:
    """Of SuperGlue."""
    yield CheckpointLayout(
        "SuperGlue",
        "as magicleap/SuperGluePretrainedNetwork has it",
        _rules(
            ("position.hidden.{n}.linear", "kenc.encoder.{first}"),
            ("position.hidden.{n}.norm", "kenc.encoder.{second}"),
            ("position.out", "kenc.encoder.12"),
            (
                f"{_OF_BLOCK}attention.qkv",
                _joined("gnn.layers.[layer].attn.proj.{}", "0", "1", "2"),
                fast_heads,
            ),
            (f"{_OF_BLOCK}attention.out", "gnn.layers.[layer].attn.merge", None, fast_heads_merged),
            (f"{_OF_BLOCK}ffn.widen", "gnn.layers.[layer].mlp.0"),
            (f"{_OF_BLOCK}ffn.norm", "gnn.layers.[layer].mlp.1"),
            (f"{_OF_BLOCK}ffn.narrow", "gnn.layers.[layer].mlp.3"),
            ("heads.0.projection", "final_proj"),
            ("heads.0.dustbin", "bin_score"),
        ),
    )
    yield CheckpointLayout(
        "SuperGlue",
        "as transformers has it",
        _rules(
            ("position.hidden.{n}.linear", "keypoint_encoder.encoder.{n}.linear"),
            ("position.hidden.{n}.norm", "keypoint_encoder.encoder.{n}.batch_norm"),
            ("position.out", "keypoint_encoder.encoder.4"),
            (
                f"{_OF_BLOCK}attention.qkv",
                _joined("gnn.layers.[layer].attention.self.{}", "query", "key", "value"),
            ),
            (f"{_OF_BLOCK}attention.out", "gnn.layers.[layer].attention.output.dense"),
            (f"{_OF_BLOCK}ffn.widen", "gnn.layers.[layer].mlp.0.linear"),
            (f"{_OF_BLOCK}ffn.norm", "gnn.layers.[layer].mlp.0.batch_norm"),
            (f"{_OF_BLOCK}ffn.narrow", "gnn.layers.[layer].mlp.1"),
            ("heads.0.projection", "final_projection.final_proj"),
            ("heads.0.dustbin", "bin_score"),
        ),
        ignored=r"keypoint_detector\..*",
    )


def _loftr_layers(ours: str, theirs: str) -> tuple[tuple[Any, ...], ...]:
    """Of the coarse or the fine stage."""
    ours, theirs = f"{ours}{_OF_BLOCK}", f"{theirs}.layers.[layer]."
    return (
        (f"{ours}attention.qkv", _joined(f"{theirs}{{}}", "q_proj", "k_proj", "v_proj")),
        (f"{ours}attention.out", f"{theirs}merge"),
        (f"{ours}message_norm", f"{theirs}norm1"),
        (f"{ours}ffn.widen", f"{theirs}mlp.0"),
        (f"{ours}ffn.narrow", f"{theirs}mlp.2"),
        (f"{ours}ffn.output_norm", f"{theirs}norm2"),
    )


def _loftr_backbone() -> Iterable[tuple[str, str]]:
    for stage in range(3):
        theirs = f"backbone.layer{stage + 1}"
        for part, conv, norm in (
            ("first", "conv1", "bn1"),
            ("second", "conv2", "bn2"),
            ("skip", "downsample.0", "downsample.1"),
        ):
            ours = f"backbone.stages.{stage}.{{n}}.{part}"
            yield f"{ours}.conv", f"{theirs}.{{n}}.{conv}"
            yield f"{ours}.norm", f"{theirs}.{{n}}.{norm}"
        yield f"backbone.laterals.{stage}", f"{theirs}_outconv"
        if stage < 2:
            for ours, number in (("inner.conv", 0), ("inner.norm", 1), ("outer", 3)):
                yield f"backbone.merges.{stage}.{ours}", f"{theirs}_outconv2.{number}"


def _of_loftr() -> Iterator[CheckpointLayout]:
    """Of LoFTR."""
    yield CheckpointLayout(
        "LoFTR",
        "as zju3dv/LoFTR and kornia have it",
        _rules(
            ("backbone.stem.conv", "backbone.conv1"),
            ("backbone.stem.norm", "backbone.bn1"),
            *_loftr_backbone(),
            *_loftr_layers("", "loftr_coarse"),
            ("heads.0.dustbin", "coarse_matching.bin_score"),
            ("fine.reduce", "fine_preprocess.down_proj"),
            ("fine.merge", "fine_preprocess.merge_feat"),
            *_loftr_layers("fine.", "loftr_fine"),
        ),
    )


def _of_superpoint() -> Iterator[CheckpointLayout]:
    """Of SuperPoint and its retrained version."""
    yield CheckpointLayout(
        "SuperPoint",
        "as magicleap/SuperPointPretrainedNetwork has it",
        _rules(
            *((f"encoder.{n}.conv", f"conv{n // 2 + 1}{'ab'[n % 2]}") for n in range(8)),
            *((f"points.{n}.conv", f"convP{'ab'[n]}") for n in range(2)),
            *((f"descriptors.{n}.conv", f"convD{'ab'[n]}") for n in range(2)),
        ),
    )
    yield CheckpointLayout(
        "SuperPoint",
        "as transformers has it",
        _rules(
            *((f"encoder.{n}.conv", f"encoder.conv_blocks.{n // 2}.conv_{'ab'[n % 2]}") for n in range(8)),
            *((f"points.{n}.conv", f"keypoint_decoder.conv_score_{'ab'[n]}") for n in range(2)),
            *((f"descriptors.{n}.conv", f"descriptor_decoder.conv_descriptor_{'ab'[n]}") for n in range(2)),
        ),
    )
    yield CheckpointLayout(
        "SuperPoint-open",
        "as rpautrat/SuperPoint has it",
        _rules(
            *((f"encoder.{n}.conv", f"backbone.{n // 2}.{n % 2}.conv") for n in range(8)),
            *((f"encoder.{n}.norm", f"backbone.{n // 2}.{n % 2}.bn") for n in range(8)),
            ("points.{n}.conv", "detector.{n}.conv"),
            ("points.{n}.norm", "detector.{n}.bn"),
            ("descriptors.{n}.conv", "descriptor.{n}.conv"),
            ("descriptors.{n}.norm", "descriptor.{n}.bn"),
        ),
    )


@cache
def layouts() -> tuple[CheckpointLayout, ...]:
    """Every layout in use."""
    return (*_of_lightglue(), *_of_superglue(), *_of_loftr(), *_of_superpoint())


# Conversion.

# Which system a preset's network is of, by the beginning of the preset's name.
SYSTEMS = {"lightglue-": "LightGlue", "superglue-": "SuperGlue", "loftr-": "LoFTR"}
# Networks that were published beside the preset's own: the tensor that shows one, and how it assigns.
VARIANTS: dict[str, tuple[str, AssignmentConfig]] = {
    "LoFTR": ("coarse_matching.bin_score", LOFTR_TRANSPORT),  # "ot", optimal transport, beside "ds"
}
# Front ends whose network is ours, and what the layouts call them; in the others names are as published.
_FRONT_ENDS = {"superpoint": "SuperPoint", "superpoint-open": "SuperPoint-open"}


def import_checkpoint(
    path: str | Path, preset: str, output: str | Path, metadata: Mapping[str, str] | None = None
) -> str:
    """Convert a published checkpoint into a weights file that `load(preset, weights=output)` takes.

    A checkpoint of a variant in `VARIANTS` makes a file of that variant; its header names it to `load`.

    Args:
        path: the checkpoint, in one of the layouts of `layouts`.
        preset: the preset whose network it is.
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
    mark, assignment = VARIANTS.get(system, ("", config.assignment))
    if mark in tensors:
        config = replace(config, assignment=assignment)
    with torch.random.fork_rng(devices=[]):
        model = MatchingNetwork(config).eval()
    _fill(model, path, tensors, system, config.context.heads)
    return save_model(model, output, metadata, dtype=torch.float32)


def import_front_end(
    parts: Sequence[tuple[Path, str]],
    config: ExtractorConfig,
    output: str | Path,
    *,
    constants: tuple[str, ...] = (),
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Convert a front end's published files into one weights file for `load(…, frontend_weights=output)`.

    Args:
        parts: the files, each with what our names have before the file's.
        config: of the front end; its kind and variant choose the network.
        output: of the new safetensors file, float32; an existing one is replaced.
        constants: beginnings of names of ours that are in no file.
        metadata: further header entries.

    Returns:
        The sha256 of the new file.

    Raises:
        UsageError: an unknown variant or suffix.
        IntegrityError: a file cannot be read or the tensors are not those of the front end.
    """
    front_end = find_front_end(config.kind)
    with torch.random.fork_rng(devices=[]):
        network = front_end.build(resolve(config, front_end.published)).eval()
    if config.kind in _FRONT_ENDS:
        fill_network(network, parts[0][0], _FRONT_ENDS[config.kind])
        return save_front_end(network, config.kind, output, metadata)
    found = {part + name: tensor for path, part in parts for name, tensor in read_checkpoint(path).items()}
    expected = {
        name: tensor
        for name, tensor in network.state_dict().items()
        if not name.startswith(constants) and (name in found or not name.endswith(COUNTER))
    }
    try:
        network.load_state_dict(
            checked(found, expected, f"the front end {config.kind} asks for"), strict=False
        )
    except IntegrityError as error:
        said = f"{', '.join(str(path) for path, _ in parts)} {_as_front_end(found, config.kind)}"
        raise IntegrityError(f"{said}{error}") from error
    return save_front_end(network, config.kind, output, metadata)


def fill_network(network: nn.Module, path: str | Path, system: str, *, heads: int = 1) -> None:
    """Put the parameters of a published checkpoint into a network of ours, all of them or none.

    Args:
        network: on the CPU, in float32.
        path: the checkpoint.
        system: one of the systems in `layouts`, such as "LightGlue".
        heads: of attention.

    Raises:
        UsageError: a suffix that is not known.
        IntegrityError: the file cannot be read or its tensors are not those of the network.
    """
    _fill(network, path, read_checkpoint(path), system, heads)


def _fill(network: nn.Module, path: str | Path, tensors: dict[str, Tensor], system: str, heads: int) -> None:
    try:
        layout = choose_layout(tensors, system)
        network.load_state_dict(convert(tensors, network.state_dict(), layout, heads))
    except IntegrityError as error:
        raise IntegrityError(f"{path} {error}") from error


# A part of a name that tensors of this front end alone have.
_MARKS = {"aliked": "desc_head.", "disk": "unet.path_down", "xfeat": "heatmap_head."}


def _as_front_end(tensors: Mapping[str, Tensor], but: str) -> str:
    """What front end a checkpoint is of, where it is not the one asked for; begins a sentence."""
    kinds = [kind for kind, mark in _MARKS.items() if kind != but and any(mark in name for name in tensors)]
    return f"is a checkpoint of the front end {kinds[0]} and " if kinds else ""


def choose_layout(tensors: Mapping[str, Tensor], system: str) -> CheckpointLayout:
    """The layout of `system` that knows most of the tensors' names.

    Raises:
        IntegrityError: another system's layout knows more of them, or none knows any; reads on after the
            file's name.
    """
    ordered = sorted(layouts(), key=lambda layout: layout.system != system)  # on a tie the one asked for
    best = max(ordered, key=lambda layout: layout.coverage(tensors))
    if not best.coverage(tensors):
        names = ", ".join(list(tensors)[:4])
        raise IntegrityError(
            f"{_as_front_end(tensors, system)}is no checkpoint of {system}, nor of another matcher or "
            f"SuperPoint; it holds {names}, …"
        )
    if best.system != system:
        raise IntegrityError(f"is a checkpoint of {best.system} ({best.name}), not of {system}")
    return best


def convert(
    tensors: Mapping[str, Tensor], expected: dict[str, Tensor], layout: CheckpointLayout, heads: int
) -> dict[str, Tensor]:
    """Their tensors as ours, float32.

    Args:
        tensors: by their names.
        expected: our names, with tensors of the shapes that ours have.
        layout: the table.
        heads: of attention, for the order of channels.

    Raises:
        IntegrityError: missing, extra, misshaped or not finite tensors, all named as in the file; reads on
            after the file's name.
    """
    found = {layout.tidy(n): tensor for n, tensor in tensors.items() if not re.fullmatch(layout.ignored, n)}
    sources = {ours: layout.find(ours) for ours in expected}
    sources = {ours: s for ours, s in sources.items() if s.names[0] in found or not ours.endswith(COUNTER)}
    wanted = {}
    for ours, source in sources.items():
        shape, count = expected[ours].shape, len(source.names)
        part = (shape[0] // count, *shape[1:]) if count > 1 else shape
        names = (*source.names, source.copy) if source.copy else source.names
        wanted |= {name: torch.empty(part, device="meta") for name in names}
    where = f"{layout.system} {layout.name} has"
    found = checked({n: _fitted(tensor, wanted.get(n)) for n, tensor in found.items()}, wanted, where)
    for source in sources.values():
        if source.copy and not torch.equal(found[source.copy], found[source.names[0]]):
            raise IntegrityError(
                f"does not hold one projection for both: {source.copy} differs from {source.names[0]}"
            )
    made = {ours: _assembled(source, found, heads) for ours, source in sources.items()}
    return {
        ours: made.get(ours, tensor).to(tensor.dtype).clone(memory_format=torch.contiguous_format)
        for ours, tensor in expected.items()
    }


def _assembled(source: TensorSource, found: Mapping[str, Tensor], heads: int) -> Tensor:
    value = torch.cat([found[n] for n in source.names]) if len(source.names) > 1 else found[source.names[0]]
    if source.rows is not None:
        value = value[source.rows(value.shape[0], heads)]
    if source.columns is not None and value.dim() > 1:
        value = value[:, source.columns(value.shape[1], heads)]
    return value


def _fitted(tensor: Tensor, wanted: Tensor | None) -> Tensor:
    """Sides of length 1 are no difference: a convolution over points is a linear map."""
    if wanted is not None and [n for n in tensor.shape if n != 1] == [n for n in wanted.shape if n != 1]:
        return tensor.reshape(wanted.shape)
    return tensor
