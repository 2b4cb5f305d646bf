"""Which tensor of a published checkpoint is which parameter of ours: one table for each layout in use."""

from __future__ import annotations

from matcher.checkpoints.layouts import (
    Layout,
    Row,
    fast_heads,
    fast_heads_merged,
    interleaved_rotary,
    stacked_rotary,
)

_LIGHTGLUE = Layout(
    "LightGlue",
    "as cvg/LightGlue and kornia have it",
    (
        Row("project", "input_proj"),
        Row("position.frequencies", "posenc.Wr"),
        Row("layers.{n}.within.qkv", "self_attn.{n}.Wqkv", rows=interleaved_rotary),
        Row("layers.{n}.within.out", "self_attn.{n}.out_proj"),
        Row("layers.{n}.within.ffn.widen", "self_attn.{n}.ffn.0"),
        Row("layers.{n}.within.ffn.norm", "self_attn.{n}.ffn.1"),
        Row("layers.{n}.within.ffn.narrow", "self_attn.{n}.ffn.3"),
        Row("layers.{n}.across.qkv", "cross_attn.{n}.to_qk + cross_attn.{n}.to_v"),
        Row("layers.{n}.across.out", "cross_attn.{n}.to_out"),
        Row("layers.{n}.across.ffn.widen", "cross_attn.{n}.ffn.0"),
        Row("layers.{n}.across.ffn.norm", "cross_attn.{n}.ffn.1"),
        Row("layers.{n}.across.ffn.narrow", "cross_attn.{n}.ffn.3"),
        Row("heads.{n}.projection", "log_assignment.{n}.final_proj"),
        Row("heads.{n}.matchability", "log_assignment.{n}.matchability"),
        Row("confidence.{n}", "token_confidence.{n}.token.0"),
    ),
    # The released files have the old names; glue-factory and kornia save the new ones.
    renames=((r"^transformers\.([0-9]+)\.(self|cross)_attn\.", r"\2_attn.\1."),),
    ignored=("confidence_thresholds", "extractor."),
)
_LIGHTGLUE_TRANSFORMERS = Layout(
    "LightGlue",
    "as transformers has it",
    (
        Row("project", "input_projection"),
        Row("position.frequencies", "positional_encoder.projector"),
        Row(
            "layers.{n}.within.qkv",
            "transformer_layers.{n}.self_attention.q_proj + transformer_layers.{n}.self_attention.k_proj"
            " + transformer_layers.{n}.self_attention.v_proj",
            rows=stacked_rotary,
        ),
        Row("layers.{n}.within.out", "transformer_layers.{n}.self_attention.o_proj"),
        Row("layers.{n}.within.ffn.widen", "transformer_layers.{n}.self_mlp.fc1"),
        Row("layers.{n}.within.ffn.norm", "transformer_layers.{n}.self_mlp.layer_norm"),
        Row("layers.{n}.within.ffn.narrow", "transformer_layers.{n}.self_mlp.fc2"),
        Row(
            "layers.{n}.across.qkv",
            "transformer_layers.{n}.cross_attention.q_proj + transformer_layers.{n}.cross_attention.v_proj",
            copy="transformer_layers.{n}.cross_attention.k_proj",
        ),
        Row("layers.{n}.across.out", "transformer_layers.{n}.cross_attention.o_proj"),
        Row("layers.{n}.across.ffn.widen", "transformer_layers.{n}.cross_mlp.fc1"),
        Row("layers.{n}.across.ffn.norm", "transformer_layers.{n}.cross_mlp.layer_norm"),
        Row("layers.{n}.across.ffn.narrow", "transformer_layers.{n}.cross_mlp.fc2"),
        Row("heads.{n}.projection", "match_assignment_layers.{n}.final_projection"),
        Row("heads.{n}.matchability", "match_assignment_layers.{n}.matchability"),
        Row("confidence.{n}", "token_confidence.{n}.token"),
    ),
    ignored=("keypoint_detector.",),
)
_SUPERGLUE = Layout(
    "SuperGlue",
    "as magicleap/SuperGluePretrainedNetwork has it",
    (
        Row("position.hidden.{n}.linear", "kenc.encoder.{first}"),
        Row("position.hidden.{n}.norm", "kenc.encoder.{second}"),
        Row("position.out", "kenc.encoder.12"),
        Row(
            "layers.{n}.within.qkv",
            "gnn.layers.{even}.attn.proj.0 + gnn.layers.{even}.attn.proj.1 + gnn.layers.{even}.attn.proj.2",
            rows=fast_heads,
        ),
        Row("layers.{n}.within.out", "gnn.layers.{even}.attn.merge", columns=fast_heads_merged),
        Row("layers.{n}.within.ffn.widen", "gnn.layers.{even}.mlp.0"),
        Row("layers.{n}.within.ffn.norm", "gnn.layers.{even}.mlp.1"),
        Row("layers.{n}.within.ffn.narrow", "gnn.layers.{even}.mlp.3"),
        Row(
            "layers.{n}.across.qkv",
            "gnn.layers.{odd}.attn.proj.0 + gnn.layers.{odd}.attn.proj.1 + gnn.layers.{odd}.attn.proj.2",
            rows=fast_heads,
        ),
        Row("layers.{n}.across.out", "gnn.layers.{odd}.attn.merge", columns=fast_heads_merged),
        Row("layers.{n}.across.ffn.widen", "gnn.layers.{odd}.mlp.0"),
        Row("layers.{n}.across.ffn.norm", "gnn.layers.{odd}.mlp.1"),
        Row("layers.{n}.across.ffn.narrow", "gnn.layers.{odd}.mlp.3"),
        Row("heads.0.projection", "final_proj"),
        Row("heads.0.dustbin", "bin_score"),
    ),
)
_SUPERGLUE_TRANSFORMERS = Layout(
    "SuperGlue",
    "as transformers has it",
    (
        Row("position.hidden.{n}.linear", "keypoint_encoder.encoder.{n}.linear"),
        Row("position.hidden.{n}.norm", "keypoint_encoder.encoder.{n}.batch_norm"),
        Row("position.out", "keypoint_encoder.encoder.4"),
        Row(
            "layers.{n}.within.qkv",
            "gnn.layers.{even}.attention.self.query + gnn.layers.{even}.attention.self.key"
            " + gnn.layers.{even}.attention.self.value",
        ),
        Row("layers.{n}.within.out", "gnn.layers.{even}.attention.output.dense"),
        Row("layers.{n}.within.ffn.widen", "gnn.layers.{even}.mlp.0.linear"),
        Row("layers.{n}.within.ffn.norm", "gnn.layers.{even}.mlp.0.batch_norm"),
        Row("layers.{n}.within.ffn.narrow", "gnn.layers.{even}.mlp.1"),
        Row(
            "layers.{n}.across.qkv",
            "gnn.layers.{odd}.attention.self.query + gnn.layers.{odd}.attention.self.key"
            " + gnn.layers.{odd}.attention.self.value",
        ),
        Row("layers.{n}.across.out", "gnn.layers.{odd}.attention.output.dense"),
        Row("layers.{n}.across.ffn.widen", "gnn.layers.{odd}.mlp.0.linear"),
        Row("layers.{n}.across.ffn.norm", "gnn.layers.{odd}.mlp.0.batch_norm"),
        Row("layers.{n}.across.ffn.narrow", "gnn.layers.{odd}.mlp.1"),
        Row("heads.0.projection", "final_projection.final_proj"),
        Row("heads.0.dustbin", "bin_score"),
    ),
    ignored=("keypoint_detector.",),
)

_SUPERPOINT = Layout(
    "SuperPoint",
    "as magicleap/SuperPointPretrainedNetwork has it",
    (
        Row("encoder.0.conv", "conv1a"),
        Row("encoder.1.conv", "conv1b"),
        Row("encoder.2.conv", "conv2a"),
        Row("encoder.3.conv", "conv2b"),
        Row("encoder.4.conv", "conv3a"),
        Row("encoder.5.conv", "conv3b"),
        Row("encoder.6.conv", "conv4a"),
        Row("encoder.7.conv", "conv4b"),
        Row("points.0.conv", "convPa"),
        Row("points.1.conv", "convPb"),
        Row("descriptors.0.conv", "convDa"),
        Row("descriptors.1.conv", "convDb"),
    ),
)
_SUPERPOINT_TRANSFORMERS = Layout(
    "SuperPoint",
    "as transformers has it",
    (
        Row("encoder.0.conv", "encoder.conv_blocks.0.conv_a"),
        Row("encoder.1.conv", "encoder.conv_blocks.0.conv_b"),
        Row("encoder.2.conv", "encoder.conv_blocks.1.conv_a"),
        Row("encoder.3.conv", "encoder.conv_blocks.1.conv_b"),
        Row("encoder.4.conv", "encoder.conv_blocks.2.conv_a"),
        Row("encoder.5.conv", "encoder.conv_blocks.2.conv_b"),
        Row("encoder.6.conv", "encoder.conv_blocks.3.conv_a"),
        Row("encoder.7.conv", "encoder.conv_blocks.3.conv_b"),
        Row("points.0.conv", "keypoint_decoder.conv_score_a"),
        Row("points.1.conv", "keypoint_decoder.conv_score_b"),
        Row("descriptors.0.conv", "descriptor_decoder.conv_descriptor_a"),
        Row("descriptors.1.conv", "descriptor_decoder.conv_descriptor_b"),
    ),
)
_SUPERPOINT_OPEN = Layout(
    "SuperPoint-open",
    "as rpautrat/SuperPoint has it",
    (
        Row("encoder.0.conv", "backbone.0.0.conv"),
        Row("encoder.0.norm", "backbone.0.0.bn"),
        Row("encoder.1.conv", "backbone.0.1.conv"),
        Row("encoder.1.norm", "backbone.0.1.bn"),
        Row("encoder.2.conv", "backbone.1.0.conv"),
        Row("encoder.2.norm", "backbone.1.0.bn"),
        Row("encoder.3.conv", "backbone.1.1.conv"),
        Row("encoder.3.norm", "backbone.1.1.bn"),
        Row("encoder.4.conv", "backbone.2.0.conv"),
        Row("encoder.4.norm", "backbone.2.0.bn"),
        Row("encoder.5.conv", "backbone.2.1.conv"),
        Row("encoder.5.norm", "backbone.2.1.bn"),
        Row("encoder.6.conv", "backbone.3.0.conv"),
        Row("encoder.6.norm", "backbone.3.0.bn"),
        Row("encoder.7.conv", "backbone.3.1.conv"),
        Row("encoder.7.norm", "backbone.3.1.bn"),
        Row("points.{n}.conv", "detector.{n}.conv"),
        Row("points.{n}.norm", "detector.{n}.bn"),
        Row("descriptors.{n}.conv", "descriptor.{n}.conv"),
        Row("descriptors.{n}.norm", "descriptor.{n}.bn"),
    ),
)

LAYOUTS = (
    _LIGHTGLUE,
    _LIGHTGLUE_TRANSFORMERS,
    _SUPERGLUE,
    _SUPERGLUE_TRANSFORMERS,
    _SUPERPOINT,
    _SUPERPOINT_TRANSFORMERS,
    _SUPERPOINT_OPEN,
)
