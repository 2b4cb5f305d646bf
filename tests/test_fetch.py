import hashlib
import http.server
import json
import re
import sys
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import peers
import pytest
import torch

import matcher
from matcher.cli import main
from matcher.errors import IntegrityError, UsageError
from matcher.presets import PRESETS
from matcher.weights import files as catalogue
from matcher.weights.files import Published, read_catalogue, read_manifest
from matcher.weights.published import download, fetch

DATA = bytes(range(256)) * 4000  # 1 MB
PAGE = b"<!DOCTYPE html><html><body>Sign in</body></html>"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Site:
    """What the server holds and does, and what it was asked."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True  # understands Range
    cut_after: list[int | None] = field(default_factory=list)  # bytes sent per request, None = all
    content_type: str = "application/octet-stream"
    says_length: bool = True
    asked: list[str | None] = field(default_factory=list)  # the Range of each request

    def url(self, name: str) -> str:
        return f"{self.address}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        site: Site = self.server.site
        path, wanted = self.path, self.headers.get("Range")
        site.asked.append(wanted)
        name = path.rsplit("/", 1)[-1]
        if name not in site.files:
            self.send_error(404)
            return
        data, start = site.files[name], 0
        if wanted and site.ranges:
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
            if start >= len(data):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Type", site.content_type)
        if site.says_length:
            self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        stop = site.cut_after.pop(0) if site.cut_after else None
        self.wfile.write(data[start:] if stop is None else data[start : start + stop])

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_):
        if not isinstance(sys.exception(), ConnectionError):  # a client may leave before the end
            super().handle_error(*_)


@pytest.fixture
def site(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server(("127.0.0.1", 0), Handler)
    server.site = Site(f"http://127.0.0.1:{server.server_port}", {"x.pth": DATA})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server.site
    server.shutdown()
    thread.join()
    server.server_close()


def get(site, path, wanted=(sha256(DATA), len(DATA)), names=("x.pth",)):
    return download([site.url(name) for name in names], path, *wanted)


def test_a_broken_transfer_goes_on_where_it_stopped(site, tmp_path):
    site.cut_after = [300_000, 0]
    assert get(site, tmp_path / "x.pth") == sha256(DATA)
    assert site.asked == [None, "bytes=300000-", "bytes=300000-"]
    site.cut_after = [100_000, 50_000, 1]
    with pytest.raises(IntegrityError, match="what came is kept"):
        get(site, tmp_path / "later.pth")
    assert not (tmp_path / "later.pth").exists()
    get(site, tmp_path / "later.pth")
    assert site.asked[-1] == "bytes=150001-" and (tmp_path / "later.pth").read_bytes() == DATA


def test_another_file_leaves_nothing(site, tmp_path):
    """Of another hash; or one that does not end, of a server that does not say how much it sends."""
    (tmp_path / "x.pth").write_bytes(b"older")
    site.files["x.pth"] = DATA[:-1] + b"!"
    with pytest.raises(IntegrityError, match=sha256(DATA)):
        get(site, tmp_path / "x.pth")
    site.files["x.pth"], site.says_length = DATA + bytes(10_000_000), False
    with pytest.raises(IntegrityError, match=f"more than {len(DATA)} bytes"):
        get(site, tmp_path / "x.pth")
    assert [path.name for path in tmp_path.iterdir()] == ["x.pth"]
    assert (tmp_path / "x.pth").read_bytes() == b"older"


def test_mirrors_are_tried_in_turn(site, tmp_path):
    site.files["bad.pth"] = b"no"
    assert get(site, tmp_path / "x.pth", names=("gone.pth", "bad.pth", "x.pth")) == sha256(DATA)
    with pytest.raises(IntegrityError, match=r"y\.pth could not be fetched.*404.*2 bytes"):
        get(site, tmp_path / "y.pth", names=("gone.pth", "bad.pth"))
    with pytest.raises(IntegrityError, match="no connection"):
        download(["http://127.0.0.1:9/y.pth"], tmp_path / "y.pth")
    assert not list(tmp_path.glob("y*"))


@pytest.mark.parametrize("content_type", ["text/html; charset=utf-8", "application/octet-stream"])
def test_a_web_page_is_no_file(site, tmp_path, content_type):
    site.files["x.pth"], site.content_type = PAGE, content_type
    with pytest.raises(IntegrityError, match="web page"):
        get(site, tmp_path / "x.pth", ())
    assert not list(tmp_path.iterdir())


@pytest.fixture
def shelf(site, tmp_path, monkeypatch) -> Published:
    """A row of small weights that the site has, alone in the catalogue, and an empty cache."""
    preset = "lightglue-xfeat"
    config = PRESETS[preset]
    context = replace(config.matcher.context, depth=2)
    monkeypatch.setitem(PRESETS, preset, replace(config, matcher=replace(config.matcher, context=context)))
    tensors = peers.kornia_lightglue(preset, n_layers=2).state_dict()
    path = peers.write_published(tensors, tmp_path / "peer.pt", prefix="matcher.")
    site.files["peer.pt"] = path.read_bytes()
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MATCHER_OFFLINE", raising=False)
    row = {
        "name": preset, "preset": preset, "megabytes": 1.5, "licence": "only for looking at",
        "commercial": False, "source": "a test", "paper": "none",
        "files": [
            {
                "urls": [site.url("peer.pt")],
                "sha256": sha256(site.files["peer.pt"]), "sha256_from": "measured",
            }
        ],
    }  # fmt: skip
    monkeypatch.setattr(catalogue, "CATALOGUE", tmp_path / "catalogue.toml")
    write_catalogue(tmp_path / "catalogue.toml", row)
    return catalogue.find_published(preset)


def write_catalogue(path: Path, row: dict) -> None:
    lines = [f"{key} = {json.dumps(value)}" for key, value in row.items() if key != "files"]
    for file in row["files"]:
        lines += ["[[published.files]]", *(f"{key} = {json.dumps(value)}" for key, value in file.items())]
    path.write_text("\n".join(["[[published]]", *lines]))


def test_fetched_weights_load(shelf, site):
    with pytest.raises(IntegrityError, match="`matcher weights fetch lightglue-xfeat --accept-licence`"):
        matcher.load("lightglue-xfeat", device="cpu")
    found = fetch(shelf, accept_licence=True)
    assert found.sha256 == {"peer.pt": shelf.files[0].sha256}
    assert found.path == shelf.folder / "lightglue-xfeat.safetensors"
    pipeline = matcher.load("lightglue-xfeat", device="cpu")
    assert pipeline.weights.name == "lightglue-xfeat"
    assert pipeline.weights.sha256 == sha256(found.path.read_bytes())
    assert fetch(shelf).sha256 == {}  # here already, so neither network nor licence
    assert len(site.asked) == 1


def test_damaged_weights_are_named_and_made_again_without_the_network(shelf, site):
    path = fetch(shelf, accept_licence=True).path
    data = path.read_bytes()
    expected = matcher.load("lightglue-xfeat", device="cpu").matcher.model.state_dict()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(IntegrityError, match=r"is damaged: .*`matcher weights fetch lightglue-xfeat"):
        matcher.load("lightglue-xfeat", device="cpu")
    fetch(shelf, accept_licence=True)
    again = matcher.load("lightglue-xfeat", device="cpu").matcher.model.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in expected.items())
    assert len(site.asked) == 1


def test_licence_and_network_must_be_accepted(shelf, site, monkeypatch):
    with pytest.raises(UsageError, match="not for commercial use"):
        fetch(shelf)
    monkeypatch.setenv("MATCHER_OFFLINE", "1")
    with pytest.raises(UsageError, match="MATCHER_OFFLINE is set"):
        fetch(shelf, accept_licence=True)
    assert not site.asked


def test_the_commands(shelf, site, capfd):
    fetched = ["weights", "fetch", "lightglue-xfeat"]
    assert main(fetched) == 2 and "--accept-licence" in capfd.readouterr().err
    assert main(["weights", "list"]) == 0
    listed = capfd.readouterr().out
    assert "lightglue-xfeat  1.5 MB  preset lightglue-xfeat  not installed" in listed
    assert f"peer.pt is pinned (measured): {shelf.files[0].sha256}" in listed
    assert main([*fetched, "--accept-licence"]) == 0
    assert f"sha256 {shelf.files[0].sha256} (as expected)" in capfd.readouterr().out
    assert main(["weights", "list"]) == 0
    assert "lightglue-xfeat  1.5 MB  preset lightglue-xfeat  installed" in capfd.readouterr().out
    assert main(["weights", "verify", "lightglue-xfeat"]) == 0


def test_an_unknown_hash_is_reported(shelf, site, tmp_path, capfd):
    row = {**vars(shelf), "files": [{"urls": list(shelf.files[0].urls)}], "constants": []}
    write_catalogue(tmp_path / "catalogue.toml", row)
    assert main(["weights", "list"]) == 0 and "peer.pt is not pinned" in capfd.readouterr().out
    fetched = ["weights", "fetch", "lightglue-xfeat", "--accept-licence"]
    assert main(fetched) == 2
    refused = capfd.readouterr().err
    assert "peer.pt" in refused and "--accept-unverified" in refused and site.url("peer.pt") in refused
    assert not site.asked and {path.name for path in shelf.folder.iterdir()} == {".lock"}
    assert main([*fetched, "--accept-unverified"]) == 0
    assert f"sha256 {sha256(site.files['peer.pt'])} (not checked" in capfd.readouterr().out


def test_what_is_pinned_must_come(shelf, site, capfd):
    """Another file than the catalogue's is refused from the first download on; nothing of it stays."""
    site.files["peer.pt"] += b"more"
    assert main(["weights", "fetch", "lightglue-xfeat", "--accept-licence"]) == 5
    error = capfd.readouterr().err
    assert sha256(site.files["peer.pt"]) in error and shelf.files[0].sha256 in error
    assert {path.name for path in shelf.folder.iterdir()} == {".lock"}


def test_the_catalogue_is_sound():
    rows = read_catalogue()
    shipped = {None, *read_manifest()}
    published = {name for name, config in PRESETS.items() if config.weights not in shipped}
    assert {row.preset for row in rows.values() if row.preset} == published
    assert {row.name for row in rows.values() if row.preset} == published
    assert not published & {row.name for row in rows.values() if row.frontend}
    for row in rows.values():
        assert bool(row.preset) != bool(row.frontend), row.name
        assert row.licence and row.source and row.paper
        assert row.commercial == ("Magic Leap" not in row.licence and "none stated" not in row.licence)
        assert len({file.name for file in row.files}) == len(row.files)
        assert all(url.startswith("https://") for file in row.files for url in file.urls)
        assert all(re.fullmatch("([0-9a-f]{64})?", file.sha256) for file in row.files)
        reports = {"measured", "several reports", "one report"}
        assert all(file.sha256_from in (reports if file.sha256 else {""}) for file in row.files)
    assert {"superpoint", "aliked-n16", "disk", "dedodeb", "xfeat"} <= rows.keys()
