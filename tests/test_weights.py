"""Weights files: saved, loaded strictly, and the shipped ones checked against their manifest."""

import hashlib
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from matcher.config import ALL_LAYERS, ExtractorConfig
from matcher.errors import IntegrityError
from matcher.presets import PRESETS
from matcher.torch_engine import build_extractor
from matcher.weights.files import load_model, read_arrays, read_manifest, save_model, verify, weights_bytes


def test_a_model_survives_the_round_trip(small_model, tmp_path):
    path = tmp_path / "m.safetensors"
    digest = save_model(small_model, path, {"recipe": "none"})
    before = torch.random.get_rng_state()
    loaded, found, name = load_model(path)
    assert torch.equal(before, torch.random.get_rng_state())
    assert (found, name) == (digest, "m") and digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert loaded.config == replace(small_model.config, policy=ALL_LAYERS) and not loaded.training
    expected, state, arrays = small_model.state_dict(), loaded.state_dict(), read_arrays(path.read_bytes())
    assert state.keys() == expected.keys() == arrays.keys()
    for key, value in state.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected[key].half().float(), rtol=0, atol=0)
        np.testing.assert_array_equal(arrays[key], value.numpy())
    save_model(loaded, tmp_path / "again.safetensors")
    first, second = load_file(path), load_file(tmp_path / "again.safetensors")
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_damaged_shipped_file_is_noticed(shelf):
    path = shelf / "small.safetensors"
    data = path.read_bytes()
    flipped = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in (0, 9, 2000)]
    for damaged in (*flipped, data[:-10], None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        for check in (weights_bytes, lambda name, folder: verify(read_manifest(folder)[name], folder)):
            with pytest.raises(IntegrityError, match=r"small\.safetensors is (damaged|absent)") as caught:
                check("small", shelf)
            assert caught.value.exit_code == 5
    for weights in ("large", shelf / "gone.safetensors", shelf):
        with pytest.raises(IntegrityError):
            weights_bytes(weights, shelf)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut short"),
        (b"<!DOCTYPE html><html><body>404 Not Found</body></html>" * 9, "not a safetensors file"),
        (b"\x80\x02}q\x00." * 40, "pickle"),
        (save({"a": torch.zeros(3)}), "no configuration"),
        (save({"a": torch.zeros(3)}, metadata={"config": '{"depth": 3}'}), "unknown key depth"),
        (save({"a": torch.zeros(999)}, metadata={"config": '{"context": {"dim": 7}}'}), "no network"),
        (save({"a": torch.zeros(9)}, metadata={"config": '{"context": {"dim": 16384}}'}), "more parameters"),
    ],
)
def test_other_files_are_refused(tmp_path, small_weights, content, message):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match=rf"m\.safetensors .*{message}"):
        load_model(path)
    whole = small_weights.read_bytes()
    for share in (1e-4, 0.01, 0.5, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(IntegrityError, match=r"m\.safetensors"):
            load_model(path)


def test_wrong_tensors_are_listed(small_model, tmp_path):
    tensors = {key: value.clone() for key, value in small_model.state_dict().items()}
    del tensors["project.bias"]
    tensors["stranger"] = torch.zeros(2)
    tensors["project.weight"] = torch.zeros(48, 64)
    tensors["layers.0.self_block.attention.out.bias"][3] = float("nan")
    metadata = {"config": json.dumps(asdict(small_model.config))}
    save_file(tensors, tmp_path / "m.safetensors", metadata=metadata)
    with pytest.raises(IntegrityError) as caught:
        load_model(tmp_path / "m.safetensors")
    for part in (
        "missing: project.bias",
        "extra: stranger",
        "misshaped: project.weight is (48, 64), not (48, 128)",
        "not finite: layers.0.self_block.attention.out.bias",
    ):
        assert part in str(caught.value)


def test_a_damaged_or_absent_manifest_is_refused(shelf):
    with pytest.raises(IntegrityError, match=r"manifest\.toml"):
        read_manifest(shelf / "absent")
    text = (shelf / "manifest.toml").read_text()
    for damaged in ("[[weights]", text.replace("small.safe", "../small.safe"), 'weights = "x"'):
        (shelf / "manifest.toml").write_text(damaged)
        with pytest.raises(IntegrityError, match=r"manifest\.toml is damaged"):
            read_manifest(shelf)


def test_shipped_weights_are_what_the_manifest_says(shipped_weights):
    rows = read_manifest()
    assert "hybrid" in rows
    for row in rows.values():
        assert verify(row).path.stat().st_size == row.bytes <= 25e6
        assert all((row.licence, row.source, row.trained_on, row.metrics))
        if row.name == PRESETS[row.preset].extractor.kind:
            network = build_extractor(ExtractorConfig(kind=row.name)).network
            assert row.bytes <= 4e6
        else:
            network, digest, name = load_model(row.name)
            assert (digest, name) == (row.sha256, row.name)
            assert network.config == replace(PRESETS[row.preset].matcher, policy=ALL_LAYERS)
        assert sum(p.numel() for p in network.parameters()) > 100_000
