"""Weights files of earlier versions: old names of tensors and of configuration keys."""

import doctest
import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as pack_tensors

from matcher.config import ALL_LAYERS, ContextConfig, MatchingPolicy, NetworkConfig
from matcher.errors import IntegrityError
from matcher.match.network import MatchingNetwork
from matcher.presets import PRESETS
from matcher.weights import files as renames
from matcher.weights.files import (
    KEYS,
    TENSORS,
    current_config,
    current_name,
    load_model,
    read_header,
    read_manifest,
    save_model,
    weights_folder,
)

OLD_NAMES = {
    "layers.1.within.qkv.weight": "layers.1.self_block.attention.qkv.weight",
    "fine.layers.0.across.out.weight": "fine.layers.0.cross_block.attention.out.weight",
    "layers.0.within.ffn.norm.bias": "layers.0.self_block.ffn.norm.bias",
    "layers.0.across.ffn.norm.bias": "layers.0.cross_block.ffn.norm.bias",
    "layers.0.within.attention.query.weight": "layers.0.self_block.attention.score.query.weight",
    "layers.0.across.attention.form.weight": "layers.0.cross_block.attention.score.form.weight",
    "guidance.waves.weight": "guidance.frequencies.weight",
    "guidance.place.weight": "guidance.encode_position.weight",
    "guidance.partner.2.bias": "guidance.predict.2.bias",
    "guidance.echo.2.weight": "guidance.encode.2.weight",
    "guidance.trust.2.bias": "guidance.confidence.2.bias",
    "consensus.widen.bias": "consensus.hidden.bias",
    "consensus.judge.bias": "consensus.out.bias",
    "prospect.0.weight": "match_probability.0.weight",
}


@pytest.mark.parametrize("old", OLD_NAMES)
def test_old_names_become_the_present_ones(old):
    assert current_name(old) == OLD_NAMES[old]
    assert current_name(OLD_NAMES[old]) == OLD_NAMES[old]


def test_every_line_of_the_table_is_tried():
    assert len(OLD_NAMES) == len(TENSORS)


@pytest.mark.parametrize("name", ["hybrid", "hybrid-learned"])
def test_shipped_files_load_with_the_architecture_of_their_preset(name):
    network, _, _ = load_model(name)
    assert network.config == replace(PRESETS[name].matcher, policy=ALL_LAYERS)
    stored = parse_tensors((weights_folder() / read_manifest()[name].file).read_bytes())
    state = network.state_dict()
    assert len(stored) == len(state)
    for old, tensor in stored.items():
        assert torch.equal(state[current_name(old)], tensor.float())


def test_new_files_carry_the_present_names_and_no_policy(tmp_path):
    policy = MatchingPolicy(match_threshold=0.77, exit_share=0.55)
    config = NetworkConfig(
        guided=True, match_probability=True, context=ContextConfig(dim=32, depth=2), policy=policy
    )
    with torch.random.fork_rng(devices=[]):
        save_model(MatchingNetwork(config), tmp_path / "new.safetensors", dtype=torch.float32)
    data = (tmp_path / "new.safetensors").read_bytes()
    header = json.loads(read_header(data)["config"])
    assert not {"policy", "match_threshold", "adaptivity", *KEYS} & set(header)
    assert all(current_name(name) == name for name in parse_tensors(data))
    assert load_model(tmp_path / "new.safetensors")[0].config == replace(config, policy=ALL_LAYERS)


def test_a_file_with_old_names_gives_the_same_network(tmp_path):
    config = NetworkConfig(guided=True, match_probability=True, context=ContextConfig(dim=32, depth=2))
    with torch.random.fork_rng(devices=[]):
        network = MatchingNetwork(config)
    state = network.state_dict()
    old = {
        re.sub(r"\.self_block(\.attention)?", ".within", name).replace("match_probability", "prospect"): t
        for name, t in state.items()
    }
    assert old.keys() != state.keys()
    tables = {
        "guided": True,
        "context": {"dim": 32, "depth": 2, "in_turn": False},
        "adaptivity": {"prospects": True, "least_pruned": 0.1},
        "doubt": 20.0,
        "match_threshold": 0.5,
    }
    path = tmp_path / "old.safetensors"
    path.write_bytes(pack_tensors(old, metadata={"config": json.dumps(tables)}))
    loaded, _, _ = load_model(path)
    assert loaded.config == replace(config, policy=ALL_LAYERS)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in state.items())


def test_a_tensor_under_both_names_is_refused(tmp_path):
    with torch.random.fork_rng(devices=[]):
        save_model(
            MatchingNetwork(NetworkConfig(context=ContextConfig(dim=32, depth=1))), tmp_path / "a.safetensors"
        )
    data = (tmp_path / "a.safetensors").read_bytes()
    tensors = parse_tensors(data)
    tensors["layers.0.within.out.bias"] = tensors["layers.0.self_block.attention.out.bias"].clone()
    (tmp_path / "a.safetensors").write_bytes(pack_tensors(tensors, metadata=read_header(data)))
    with pytest.raises(IntegrityError, match=r"old and a new name: layers\.0\.within\.out\.bias"):
        load_model(tmp_path / "a.safetensors")


def test_an_old_configuration_keeps_its_policy_for_recipes():
    old = {"kind": "sift", "match_threshold": 0.2, "adaptivity": {"prospects": False, "exit_share": 0.5}}
    assert current_config(old) == {
        "kind": "sift",
        "match_probability": False,
        "policy": {"match_threshold": 0.2, "exit_share": 0.5},
    }
    present = {"kind": "sift", "policy": {"exit_share": 0.5}}
    assert current_config(present) == present


@pytest.mark.parametrize("guided", [False, True])
def test_a_header_without_position_inputs_is_refused_by_name(tmp_path, guided):
    path = tmp_path / "empty.safetensors"
    tables = {"guided": guided, "position": {"inputs": []}}
    path.write_bytes(pack_tensors({"x": torch.zeros(1)}, metadata={"config": json.dumps(tables)}))
    with pytest.raises(IntegrityError, match=r"empty\.safetensors .*position\.inputs is empty"):
        load_model(path)


def test_the_examples_in_the_docstrings():
    failed, tried = doctest.testmod(renames)
    assert tried >= 3 and not failed
