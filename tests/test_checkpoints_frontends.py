"""Published files of front ends made of several networks: what kornia reads from them, we read too."""

from functools import partial
from pathlib import Path

import pytest
import torch
from random_front_end import FRONT_ENDS, random_parameters, texture, whole

from matcher.config import ExtractorConfig
from matcher.errors import IntegrityError, UsageError
from matcher.extract.front_end import resolve
from matcher.torch_engine import build_extractor
from matcher.weights.download import import_files
from matcher.weights.files import find_published

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


def imported(kind: str, folder: Path, **settings):
    """The front end with its files imported by our command's function."""
    paths = publish(kind, folder)
    output = import_files(paths, kind, folder / "ours.safetensors")
    return paths, build_extractor(ExtractorConfig(kind=kind, **settings), output)


def describe(table: dict, points: torch.Tensor) -> torch.Tensor:
    return torch.stack([table[tuple(point)] for point in points.round().int().tolist()])


@pytest.mark.parametrize("kind", ["dedodeb", pytest.param("dedodeg", marks=pytest.mark.slow)])
def test_dedode_is_what_kornia_makes_of_the_files(kind, shallow, undrawn, kornia_reads, tmp_path, rng):
    paths, extractor = imported(kind, tmp_path, max_keypoints=60)
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
    torch.testing.assert_close(
        features.descriptors, describe(table, features.keypoints), rtol=1e-3, atol=1e-3
    )


PEERS = {"keynet": "KeyNetAffNetHardNet", "doghardnet": "DoGHardNet"}


@pytest.mark.parametrize("kind", PEERS)
def test_patches_are_what_kornia_makes_of_the_files(kind, kornia_reads, tmp_path, rng):
    paths, extractor = imported(kind, tmp_path, max_keypoints=60)
    peer = getattr(feature, PEERS[kind])(num_features=400).eval()
    assert set(kornia_reads) == {path.name for path in paths}
    pixels = texture(rng, 160, 128, sigma=2.0)
    (features,) = extractor([whole(pixels)])
    with torch.no_grad():
        frames, _, descriptors = (x[0] for x in peer(torch.from_numpy(pixels)[None, None].float() / 255))
    near, index = (
        (frames[:, :, :2].flatten(1) - features.affine_frames.flatten(1)[:, None]).norm(dim=-1).min(dim=1)
    )
    assert len(features) == 60
    assert (near < 1e-2).float().mean() > 0.95  # kornia cuts to a number at another place
    torch.testing.assert_close(
        features.descriptors[near < 1e-2], descriptors[index][near < 1e-2], rtol=0, atol=1e-3
    )


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
