"""Which tensor of a published checkpoint is which parameter of ours: one table for each layout in use."""

from __future__ import annotations

from matcher.weights.published.layouts import (
    CheckpointLayout,
    TensorRule,
    fast_heads,
    fast_heads_merged,
    interleaved_rotary,
    stacked_rotary,
)

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
