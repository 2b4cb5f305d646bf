"""The field's published weights by name, and where they lie on this machine."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from matcher.config import ExtractorConfig, from_dict
from matcher.errors import IntegrityError, UsageError, unknown_name
from matcher.files import cache_folder
from matcher.match.network import MatchingNetwork
from matcher.weights.files import (
    RESTORE,
    WeightsBytes,
    fill_front_end,
    load_model,
    read_manifest,
    verify,
    weights_bytes,
)

# --- catalogue: The field's published weights by name, and where they lie on this machine.

CATALOGUE = Path(__file__).with_name("catalogue.toml")


@dataclass(frozen=True)
class PublishedFile:
    """One file, wherever it lies."""

    urls: tuple[str, ...]  # the source first, then its mirrors
    sha256: str = ""  # empty where it is not known
    sha256_from: str = ""  # how it is known: "measured", "several reports", "one report"
    bytes: int = 0  # 0 where it is not known
    part: str = ""  # what our names have before the file's

    @property
    def name(self) -> str:
        """As it is published."""
        return PurePosixPath(urlsplit(self.urls[0]).path).name


@dataclass(frozen=True)
class Published:
    """Published weights of one preset's network or one front end."""

    name: str
    files: tuple[PublishedFile, ...]
    megabytes: float  # about
    licence: str
    commercial: bool  # whether the licence allows commercial use
    source: str
    paper: str
    preset: str = ""  # whose network it is, or
    frontend: str = ""  # which front end
    variant: str = ""  # of the front end
    note: str = ""
    constants: tuple[str, ...] = ()  # beginnings of names of ours that are not trained and in no file

    @property
    def folder(self) -> Path:
        """Where the file and what is made of it lie on this machine."""
        return cache_folder() / "weights" / self.name

    @property
    def command(self) -> str:
        """What a user types to get it."""
        return f"matcher weights fetch {self.name}{'' if self.commercial else ' --accept-licence'}"


def read_catalogue(path: Path | None = None) -> dict[str, Published]:
    """All published weights by name; `path` is another catalogue than the package's."""
    tables = tomllib.loads((path or CATALOGUE).read_text(encoding="utf-8"))["published"]
    rows = [from_dict(Published, table) for table in tables]
    return {row.name: row for row in rows}


def find_published(name: str) -> Published:
    """The row of that name.

    Raises:
        UsageError: there is none; the message lists those that exist.
    """
    rows = read_catalogue()
    if name not in rows:
        raise UsageError(unknown_name("published weights", name, rows))
    return rows[name]


def locate(row: Published) -> Path:
    """The checked weights file on this machine that was made of published weights.

    Raises:
        IntegrityError: absent or damaged; the message names the command to get it.
    """
    _check_presence(row)
    manifest = read_manifest(row.folder, remedy=_remedy(row))
    if row.name not in manifest:
        raise IntegrityError(f"{row.folder / 'manifest.toml'} is damaged: {_remedy(row)}")
    return verify(manifest[row.name], row.folder, remedy=_remedy(row))


class WeightsPlace(NamedTuple):
    """What `weights_bytes` needs to find a file."""

    weights: str | Path
    folder: Path | None
    remedy: str


def find_place(weights: str | Path) -> WeightsPlace:
    """Where the weights of a matcher's network are; arguments and errors as of `find_weights`."""
    rows = read_catalogue()
    if isinstance(weights, Path) or weights not in rows:
        return WeightsPlace(weights, None, RESTORE)
    row = rows[weights]
    if not row.preset:
        raise UsageError(f"{row.name} is a front end, not a matcher's network")
    _check_presence(row)
    return WeightsPlace(row.name, row.folder, _remedy(row))


def find_weights(weights: str | Path) -> WeightsBytes:
    """The weights file of a matcher's network, of ours or published: as `weights_bytes`, which it extends.

    Args:
        weights: a name in our manifest or in the catalogue, or the path of a weights file.

    Raises:
        IntegrityError: absent or damaged; the message names the command to get it.
    """
    place = find_place(weights)
    return weights_bytes(place.weights, place.folder, remedy=place.remedy)


def locate_front_end(config: ExtractorConfig) -> Path:
    """The checked file of a front end's parameters: the shipped one, or that of `matcher weights fetch`.

    Raises:
        IntegrityError: absent or damaged; the message names the command to get it.
    """
    rows = [row for row in read_catalogue().values() if row.frontend == config.kind]
    if not rows:
        if config.kind not in (shipped := read_manifest()):
            raise IntegrityError(
                f"no weights are known for the front end {config.kind!r}: give a file of them "
                "as frontend_weights"
            )
        return verify(shipped[config.kind])
    return locate(next(row for row in rows if config.variant in (None, row.variant)))


def _check_presence(row: Published) -> None:
    if not (row.folder / "manifest.toml").is_file():
        raise IntegrityError(
            f"the published weights {row.name} are not on this machine: run `{row.command}`, or"
            f" `matcher weights import FILE --preset {row.name}` with a file that you have"
            f" ({row.licence}; {row.source})"
        )


def _remedy(row: Published) -> str:
    return f"run `{row.command}` again"


# --- layouts: What a table of a published checkpoint's names is, and the orders that its channels may lie
# in.

Order = Callable[
    [int, int], Tensor
]  # (channels, heads) → for each channel of ours, which one of theirs it is
_LEAF = r"(?:\.(?:weight|bias|running_mean|running_var|num_batches_tracked))?"
# Name in a template: (a, b) is a·n + b.
_NUMBERS = {"n": (1, 0), "even": (2, 0), "odd": (2, 1), "first": (3, 0), "second": (3, 1)}


class TensorRule(NamedTuple):
    """One line of a table: a module, or a lone parameter, of ours and what makes it.

    Weights, biases and running statistics follow their module. `{n}` is a number of ours, the other braces
    are what theirs has for it, as in `_NUMBERS`.
    """

    ours: str
    theirs: str  # names joined by " + " when several tensors, one below the other, are one of ours
    rows: Order | None = None  # order of the output channels
    columns: Order | None = None  # order of a weight's input channels
    copy: str = ""  # a tensor that must repeat the first of `theirs`


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
    rows: tuple[TensorRule, ...]
    renames: tuple[tuple[str, str], ...] = ()  # regular expressions that make newer names old ones
    ignored: tuple[str, ...] = ()  # beginnings of names that are no parameters of this network

    def tidy(self, name: str) -> str:
        """A name of theirs as the table has it."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def coverage(self, names: Iterable[str]) -> int:
        """How many of these names the table knows."""
        known = [part for row in self.rows for part in _parts(row)]
        pattern = re.compile("|".join(f"(?:{_expression(part)})" for part in known))
        return sum(pattern.fullmatch(self.tidy(name)) is not None for name in names)

    def find(self, ours: str) -> TensorSource:
        """What makes a parameter of ours; a tensor of the same name when no row knows it."""
        for row in self.rows:
            pattern = re.escape(row.ours).replace(re.escape("{n}"), "(?P<n>[0-9]+)")
            if match := re.fullmatch(f"{pattern}(?P<leaf>{_LEAF})", ours):
                n = int(match.groupdict().get("n", 0))
                numbers = {key: a * n + b for key, (a, b) in _NUMBERS.items()}
                names = tuple(part.format(**numbers) + match["leaf"] for part in row.theirs.split(" + "))
                copy = row.copy.format(**numbers) + match["leaf"] if row.copy else ""
                return TensorSource(names, copy, row.rows, row.columns)
        return TensorSource((ours,))


def _parts(row: TensorRule) -> list[str]:
    return [*row.theirs.split(" + "), *([row.copy] if row.copy else [])]


def _expression(theirs: str) -> str:
    return re.sub(r"\\{\w+\\}", "[0-9]+", re.escape(theirs)) + _LEAF


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


# --- tables: Which tensor of a published checkpoint is which parameter of ours: one table for each layout
# in use.

_LIGHTGLUE = CheckpointLayout(
    "LightGlue",
    "as cvg/LightGlue and kornia have it",
    (
        TensorRule("project", "input_proj"),
        TensorRule("position.frequencies", "posenc.Wr"),
        TensorRule("layers.{n}.self_block.attention.qkv", "self_attn.{n}.Wqkv", rows=interleaved_rotary),
        TensorRule("layers.{n}.self_block.attention.out", "self_attn.{n}.out_proj"),
        TensorRule("layers.{n}.self_block.ffn.widen", "self_attn.{n}.ffn.0"),
        TensorRule("layers.{n}.self_block.ffn.norm", "self_attn.{n}.ffn.1"),
        TensorRule("layers.{n}.self_block.ffn.narrow", "self_attn.{n}.ffn.3"),
        TensorRule("layers.{n}.cross_block.attention.qkv", "cross_attn.{n}.to_qk + cross_attn.{n}.to_v"),
        TensorRule("layers.{n}.cross_block.attention.out", "cross_attn.{n}.to_out"),
        TensorRule("layers.{n}.cross_block.ffn.widen", "cross_attn.{n}.ffn.0"),
        TensorRule("layers.{n}.cross_block.ffn.norm", "cross_attn.{n}.ffn.1"),
        TensorRule("layers.{n}.cross_block.ffn.narrow", "cross_attn.{n}.ffn.3"),
        TensorRule("heads.{n}.projection", "log_assignment.{n}.final_proj"),
        TensorRule("heads.{n}.matchability", "log_assignment.{n}.matchability"),
        TensorRule("confidence.{n}", "token_confidence.{n}.token.0"),
    ),
    # The released files have the old names; glue-factory and kornia save the new ones.
    renames=((r"^transformers\.([0-9]+)\.(self|cross)_attn\.", r"\2_attn.\1."),),
    ignored=("confidence_thresholds", "extractor."),
)
_LIGHTGLUE_TRANSFORMERS = CheckpointLayout(
    "LightGlue",
    "as transformers has it",
    (
        TensorRule("project", "input_projection"),
        TensorRule("position.frequencies", "positional_encoder.projector"),
        TensorRule(
            "layers.{n}.self_block.attention.qkv",
            "transformer_layers.{n}.self_attention.q_proj + transformer_layers.{n}.self_attention.k_proj"
            " + transformer_layers.{n}.self_attention.v_proj",
            rows=stacked_rotary,
        ),
        TensorRule("layers.{n}.self_block.attention.out", "transformer_layers.{n}.self_attention.o_proj"),
        TensorRule("layers.{n}.self_block.ffn.widen", "transformer_layers.{n}.self_mlp.fc1"),
        TensorRule("layers.{n}.self_block.ffn.norm", "transformer_layers.{n}.self_mlp.layer_norm"),
        TensorRule("layers.{n}.self_block.ffn.narrow", "transformer_layers.{n}.self_mlp.fc2"),
        TensorRule(
            "layers.{n}.cross_block.attention.qkv",
            "transformer_layers.{n}.cross_attention.q_proj + transformer_layers.{n}.cross_attention.v_proj",
            copy="transformer_layers.{n}.cross_attention.k_proj",
        ),
        TensorRule("layers.{n}.cross_block.attention.out", "transformer_layers.{n}.cross_attention.o_proj"),
        TensorRule("layers.{n}.cross_block.ffn.widen", "transformer_layers.{n}.cross_mlp.fc1"),
        TensorRule("layers.{n}.cross_block.ffn.norm", "transformer_layers.{n}.cross_mlp.layer_norm"),
        TensorRule("layers.{n}.cross_block.ffn.narrow", "transformer_layers.{n}.cross_mlp.fc2"),
        TensorRule("heads.{n}.projection", "match_assignment_layers.{n}.final_projection"),
        TensorRule("heads.{n}.matchability", "match_assignment_layers.{n}.matchability"),
        TensorRule("confidence.{n}", "token_confidence.{n}.token"),
    ),
    ignored=("keypoint_detector.",),
)
_SUPERGLUE = CheckpointLayout(
    "SuperGlue",
    "as magicleap/SuperGluePretrainedNetwork has it",
    (
        TensorRule("position.hidden.{n}.linear", "kenc.encoder.{first}"),
        TensorRule("position.hidden.{n}.norm", "kenc.encoder.{second}"),
        TensorRule("position.out", "kenc.encoder.12"),
        TensorRule(
            "layers.{n}.self_block.attention.qkv",
            "gnn.layers.{even}.attn.proj.0 + gnn.layers.{even}.attn.proj.1 + gnn.layers.{even}.attn.proj.2",
            rows=fast_heads,
        ),
        TensorRule(
            "layers.{n}.self_block.attention.out", "gnn.layers.{even}.attn.merge", columns=fast_heads_merged
        ),
        TensorRule("layers.{n}.self_block.ffn.widen", "gnn.layers.{even}.mlp.0"),
        TensorRule("layers.{n}.self_block.ffn.norm", "gnn.layers.{even}.mlp.1"),
        TensorRule("layers.{n}.self_block.ffn.narrow", "gnn.layers.{even}.mlp.3"),
        TensorRule(
            "layers.{n}.cross_block.attention.qkv",
            "gnn.layers.{odd}.attn.proj.0 + gnn.layers.{odd}.attn.proj.1 + gnn.layers.{odd}.attn.proj.2",
            rows=fast_heads,
        ),
        TensorRule(
            "layers.{n}.cross_block.attention.out", "gnn.layers.{odd}.attn.merge", columns=fast_heads_merged
        ),
        TensorRule("layers.{n}.cross_block.ffn.widen", "gnn.layers.{odd}.mlp.0"),
        TensorRule("layers.{n}.cross_block.ffn.norm", "gnn.layers.{odd}.mlp.1"),
        TensorRule("layers.{n}.cross_block.ffn.narrow", "gnn.layers.{odd}.mlp.3"),
        TensorRule("heads.0.projection", "final_proj"),
        TensorRule("heads.0.dustbin", "bin_score"),
    ),
)
_SUPERGLUE_TRANSFORMERS = CheckpointLayout(
    "SuperGlue",
    "as transformers has it",
    (
        TensorRule("position.hidden.{n}.linear", "keypoint_encoder.encoder.{n}.linear"),
        TensorRule("position.hidden.{n}.norm", "keypoint_encoder.encoder.{n}.batch_norm"),
        TensorRule("position.out", "keypoint_encoder.encoder.4"),
        TensorRule(
            "layers.{n}.self_block.attention.qkv",
            "gnn.layers.{even}.attention.self.query + gnn.layers.{even}.attention.self.key"
            " + gnn.layers.{even}.attention.self.value",
        ),
        TensorRule("layers.{n}.self_block.attention.out", "gnn.layers.{even}.attention.output.dense"),
        TensorRule("layers.{n}.self_block.ffn.widen", "gnn.layers.{even}.mlp.0.linear"),
        TensorRule("layers.{n}.self_block.ffn.norm", "gnn.layers.{even}.mlp.0.batch_norm"),
        TensorRule("layers.{n}.self_block.ffn.narrow", "gnn.layers.{even}.mlp.1"),
        TensorRule(
            "layers.{n}.cross_block.attention.qkv",
            "gnn.layers.{odd}.attention.self.query + gnn.layers.{odd}.attention.self.key"
            " + gnn.layers.{odd}.attention.self.value",
        ),
        TensorRule("layers.{n}.cross_block.attention.out", "gnn.layers.{odd}.attention.output.dense"),
        TensorRule("layers.{n}.cross_block.ffn.widen", "gnn.layers.{odd}.mlp.0.linear"),
        TensorRule("layers.{n}.cross_block.ffn.norm", "gnn.layers.{odd}.mlp.0.batch_norm"),
        TensorRule("layers.{n}.cross_block.ffn.narrow", "gnn.layers.{odd}.mlp.1"),
        TensorRule("heads.0.projection", "final_projection.final_proj"),
        TensorRule("heads.0.dustbin", "bin_score"),
    ),
    ignored=("keypoint_detector.",),
)

_LOFTR = CheckpointLayout(
    "LoFTR",
    "as zju3dv/LoFTR and kornia have it",
    (
        TensorRule("backbone.stem.conv", "backbone.conv1"),
        TensorRule("backbone.stem.norm", "backbone.bn1"),
        TensorRule("backbone.stages.0.{n}.first.conv", "backbone.layer1.{n}.conv1"),
        TensorRule("backbone.stages.0.{n}.first.norm", "backbone.layer1.{n}.bn1"),
        TensorRule("backbone.stages.0.{n}.second.conv", "backbone.layer1.{n}.conv2"),
        TensorRule("backbone.stages.0.{n}.second.norm", "backbone.layer1.{n}.bn2"),
        TensorRule("backbone.stages.0.{n}.skip.conv", "backbone.layer1.{n}.downsample.0"),
        TensorRule("backbone.stages.0.{n}.skip.norm", "backbone.layer1.{n}.downsample.1"),
        TensorRule("backbone.stages.1.{n}.first.conv", "backbone.layer2.{n}.conv1"),
        TensorRule("backbone.stages.1.{n}.first.norm", "backbone.layer2.{n}.bn1"),
        TensorRule("backbone.stages.1.{n}.second.conv", "backbone.layer2.{n}.conv2"),
        TensorRule("backbone.stages.1.{n}.second.norm", "backbone.layer2.{n}.bn2"),
        TensorRule("backbone.stages.1.{n}.skip.conv", "backbone.layer2.{n}.downsample.0"),
        TensorRule("backbone.stages.1.{n}.skip.norm", "backbone.layer2.{n}.downsample.1"),
        TensorRule("backbone.stages.2.{n}.first.conv", "backbone.layer3.{n}.conv1"),
        TensorRule("backbone.stages.2.{n}.first.norm", "backbone.layer3.{n}.bn1"),
        TensorRule("backbone.stages.2.{n}.second.conv", "backbone.layer3.{n}.conv2"),
        TensorRule("backbone.stages.2.{n}.second.norm", "backbone.layer3.{n}.bn2"),
        TensorRule("backbone.stages.2.{n}.skip.conv", "backbone.layer3.{n}.downsample.0"),
        TensorRule("backbone.stages.2.{n}.skip.norm", "backbone.layer3.{n}.downsample.1"),
        TensorRule("backbone.laterals.0", "backbone.layer1_outconv"),
        TensorRule("backbone.laterals.1", "backbone.layer2_outconv"),
        TensorRule("backbone.laterals.2", "backbone.layer3_outconv"),
        TensorRule("backbone.merges.0.inner.conv", "backbone.layer1_outconv2.0"),
        TensorRule("backbone.merges.0.inner.norm", "backbone.layer1_outconv2.1"),
        TensorRule("backbone.merges.0.outer", "backbone.layer1_outconv2.3"),
        TensorRule("backbone.merges.1.inner.conv", "backbone.layer2_outconv2.0"),
        TensorRule("backbone.merges.1.inner.norm", "backbone.layer2_outconv2.1"),
        TensorRule("backbone.merges.1.outer", "backbone.layer2_outconv2.3"),
        TensorRule(
            "layers.{n}.self_block.attention.qkv",
            "loftr_coarse.layers.{even}.q_proj + loftr_coarse.layers.{even}.k_proj"
            " + loftr_coarse.layers.{even}.v_proj",
        ),
        TensorRule("layers.{n}.self_block.attention.out", "loftr_coarse.layers.{even}.merge"),
        TensorRule("layers.{n}.self_block.message_norm", "loftr_coarse.layers.{even}.norm1"),
        TensorRule("layers.{n}.self_block.ffn.widen", "loftr_coarse.layers.{even}.mlp.0"),
        TensorRule("layers.{n}.self_block.ffn.narrow", "loftr_coarse.layers.{even}.mlp.2"),
        TensorRule("layers.{n}.self_block.ffn.output_norm", "loftr_coarse.layers.{even}.norm2"),
        TensorRule(
            "layers.{n}.cross_block.attention.qkv",
            "loftr_coarse.layers.{odd}.q_proj + loftr_coarse.layers.{odd}.k_proj"
            " + loftr_coarse.layers.{odd}.v_proj",
        ),
        TensorRule("layers.{n}.cross_block.attention.out", "loftr_coarse.layers.{odd}.merge"),
        TensorRule("layers.{n}.cross_block.message_norm", "loftr_coarse.layers.{odd}.norm1"),
        TensorRule("layers.{n}.cross_block.ffn.widen", "loftr_coarse.layers.{odd}.mlp.0"),
        TensorRule("layers.{n}.cross_block.ffn.narrow", "loftr_coarse.layers.{odd}.mlp.2"),
        TensorRule("layers.{n}.cross_block.ffn.output_norm", "loftr_coarse.layers.{odd}.norm2"),
        TensorRule("heads.0.dustbin", "coarse_matching.bin_score"),
        TensorRule("fine.reduce", "fine_preprocess.down_proj"),
        TensorRule("fine.merge", "fine_preprocess.merge_feat"),
        TensorRule(
            "fine.layers.{n}.self_block.attention.qkv",
            "loftr_fine.layers.{even}.q_proj + loftr_fine.layers.{even}.k_proj"
            " + loftr_fine.layers.{even}.v_proj",
        ),
        TensorRule("fine.layers.{n}.self_block.attention.out", "loftr_fine.layers.{even}.merge"),
        TensorRule("fine.layers.{n}.self_block.message_norm", "loftr_fine.layers.{even}.norm1"),
        TensorRule("fine.layers.{n}.self_block.ffn.widen", "loftr_fine.layers.{even}.mlp.0"),
        TensorRule("fine.layers.{n}.self_block.ffn.narrow", "loftr_fine.layers.{even}.mlp.2"),
        TensorRule("fine.layers.{n}.self_block.ffn.output_norm", "loftr_fine.layers.{even}.norm2"),
        TensorRule(
            "fine.layers.{n}.cross_block.attention.qkv",
            "loftr_fine.layers.{odd}.q_proj + loftr_fine.layers.{odd}.k_proj"
            " + loftr_fine.layers.{odd}.v_proj",
        ),
        TensorRule("fine.layers.{n}.cross_block.attention.out", "loftr_fine.layers.{odd}.merge"),
        TensorRule("fine.layers.{n}.cross_block.message_norm", "loftr_fine.layers.{odd}.norm1"),
        TensorRule("fine.layers.{n}.cross_block.ffn.widen", "loftr_fine.layers.{odd}.mlp.0"),
        TensorRule("fine.layers.{n}.cross_block.ffn.narrow", "loftr_fine.layers.{odd}.mlp.2"),
        TensorRule("fine.layers.{n}.cross_block.ffn.output_norm", "loftr_fine.layers.{odd}.norm2"),
    ),
)
_SUPERPOINT = CheckpointLayout(
    "SuperPoint",
    "as magicleap/SuperPointPretrainedNetwork has it",
    (
        TensorRule("encoder.0.conv", "conv1a"),
        TensorRule("encoder.1.conv", "conv1b"),
        TensorRule("encoder.2.conv", "conv2a"),
        TensorRule("encoder.3.conv", "conv2b"),
        TensorRule("encoder.4.conv", "conv3a"),
        TensorRule("encoder.5.conv", "conv3b"),
        TensorRule("encoder.6.conv", "conv4a"),
        TensorRule("encoder.7.conv", "conv4b"),
        TensorRule("points.0.conv", "convPa"),
        TensorRule("points.1.conv", "convPb"),
        TensorRule("descriptors.0.conv", "convDa"),
        TensorRule("descriptors.1.conv", "convDb"),
    ),
)
_SUPERPOINT_TRANSFORMERS = CheckpointLayout(
    "SuperPoint",
    "as transformers has it",
    (
        TensorRule("encoder.0.conv", "encoder.conv_blocks.0.conv_a"),
        TensorRule("encoder.1.conv", "encoder.conv_blocks.0.conv_b"),
        TensorRule("encoder.2.conv", "encoder.conv_blocks.1.conv_a"),
        TensorRule("encoder.3.conv", "encoder.conv_blocks.1.conv_b"),
        TensorRule("encoder.4.conv", "encoder.conv_blocks.2.conv_a"),
        TensorRule("encoder.5.conv", "encoder.conv_blocks.2.conv_b"),
        TensorRule("encoder.6.conv", "encoder.conv_blocks.3.conv_a"),
        TensorRule("encoder.7.conv", "encoder.conv_blocks.3.conv_b"),
        TensorRule("points.0.conv", "keypoint_decoder.conv_score_a"),
        TensorRule("points.1.conv", "keypoint_decoder.conv_score_b"),
        TensorRule("descriptors.0.conv", "descriptor_decoder.conv_descriptor_a"),
        TensorRule("descriptors.1.conv", "descriptor_decoder.conv_descriptor_b"),
    ),
)
_SUPERPOINT_OPEN = CheckpointLayout(
    "SuperPoint-open",
    "as rpautrat/SuperPoint has it",
    (
        TensorRule("encoder.0.conv", "backbone.0.0.conv"),
        TensorRule("encoder.0.norm", "backbone.0.0.bn"),
        TensorRule("encoder.1.conv", "backbone.0.1.conv"),
        TensorRule("encoder.1.norm", "backbone.0.1.bn"),
        TensorRule("encoder.2.conv", "backbone.1.0.conv"),
        TensorRule("encoder.2.norm", "backbone.1.0.bn"),
        TensorRule("encoder.3.conv", "backbone.1.1.conv"),
        TensorRule("encoder.3.norm", "backbone.1.1.bn"),
        TensorRule("encoder.4.conv", "backbone.2.0.conv"),
        TensorRule("encoder.4.norm", "backbone.2.0.bn"),
        TensorRule("encoder.5.conv", "backbone.2.1.conv"),
        TensorRule("encoder.5.norm", "backbone.2.1.bn"),
        TensorRule("encoder.6.conv", "backbone.3.0.conv"),
        TensorRule("encoder.6.norm", "backbone.3.0.bn"),
        TensorRule("encoder.7.conv", "backbone.3.1.conv"),
        TensorRule("encoder.7.norm", "backbone.3.1.bn"),
        TensorRule("points.{n}.conv", "detector.{n}.conv"),
        TensorRule("points.{n}.norm", "detector.{n}.bn"),
        TensorRule("descriptors.{n}.conv", "descriptor.{n}.conv"),
        TensorRule("descriptors.{n}.norm", "descriptor.{n}.bn"),
    ),
)

LAYOUTS = (
    _LIGHTGLUE,
    _LIGHTGLUE_TRANSFORMERS,
    _SUPERGLUE,
    _SUPERGLUE_TRANSFORMERS,
    _LOFTR,
    _SUPERPOINT,
    _SUPERPOINT_TRANSFORMERS,
    _SUPERPOINT_OPEN,
)


# --- networks: Networks filled with trained parameters, shipped or published.


def load_weights(weights: str | Path) -> tuple[MatchingNetwork, str, str]:
    """A trained network, of ours or published: as `matcher.weights.files.load_model`, which it extends.

    Args:
        weights: a name in our manifest or in the catalogue, or the path of a weights file.

    Raises:
        IntegrityError: absent or damaged; the message names the command to get it.
    """
    place = find_place(weights)
    return load_model(place.weights, place.folder, remedy=place.remedy)


def fill_extractor(network: nn.Module, config: ExtractorConfig, path: str | Path | None = None) -> None:
    """Put a front end's trained parameters into its network: as `fill_front_end`, which it extends.

    Args:
        network: on the CPU, in float32.
        config: of the front end; its kind and variant select the parameters.
        path: a converted file; None is the shipped one, or the one that `matcher weights fetch` made.

    Raises:
        IntegrityError: absent, damaged, or not this front end's; the message names the command to get it.
    """
    fill_front_end(network, config.kind, locate_front_end(config) if path is None else path)
