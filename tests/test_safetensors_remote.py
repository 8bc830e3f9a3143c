"""URLs: a real HTTP server with ranges and a real S3 server, both on loopback, and servers that misbehave."""

import http.server
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import jax
import pytest
from checkpoints import structs, write, write_sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from moto.server import ThreadedMotoServer
from support import M8, bits, counting, mesh, nothing_moved

import namedshard as ns
from namedshard._cli import main
from namedshard._safetensors import source as _source

TENSORS = {f"t{i:02}": counting(16, 8) + 1000 * i for i in range(12)}
FILES = {
    "model-00001-of-00002.safetensors": {n: TENSORS[n] for n in list(TENSORS)[:6]},
    "model-00002-of-00002.safetensors": {n: TENSORS[n] for n in list(TENSORS)[6:]},
}


class Server:
    """Serves a directory with byte ranges, and counts; ``trouble`` may answer a request instead."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.sent: list[tuple[str, int, int]] = []
        self.requests = 0
        self.trouble: Callable[[http.server.BaseHTTPRequestHandler, int], bool] = lambda handler, number: False
        outer = self
        lock = threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, body: bool) -> None:
                with lock:
                    outer.requests += 1
                    number = outer.requests
                if outer.trouble(self, number):
                    return
                path = outer.directory / urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/")
                if not path.is_file():
                    self.reply(404, b"", body)
                    return
                data = path.read_bytes()
                wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                if wanted:
                    start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
                    with lock:
                        outer.sent.append((path.name, start, stop))
                    self.reply(206, data[start:stop], body, f"bytes {start}-{stop - 1}/{len(data)}")
                else:
                    self.reply(200, data, body)

            def reply(self, status: int, data: bytes, body: bool, content_range: str = "") -> None:
                self.send_response(status)
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Length", str(len(data)))
                if content_range:
                    self.send_header("Content-Range", content_range)
                self.end_headers()
                if body:
                    self.wfile.write(data)

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def data_bytes(self) -> int:
        """Bytes of tensors that were sent: ranges after a file's header."""
        heads = {
            name: 8 + int.from_bytes((self.directory / name).read_bytes()[:8], "little") for name, _, _ in self.sent
        }
        return sum(stop - start for name, start, stop in self.sent if start >= heads[name])


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(_source, "FIRST_DELAY_S", 0.001)
    served = Server(write_sharded(tmp_path / "served", FILES))
    yield served
    served.close()


def loads(path: Any, **options: Any) -> Any:
    tree = ns.load_safetensors(path, structs(TENSORS), **options)
    assert {n: bits(x) for n, x in tree.items()} == {n: bits(x) for n, x in TENSORS.items()}
    return tree


def test_a_directory_an_index_and_a_file_over_http(server):
    loads(server.url, mesh=M8)
    loads(server.url + "/")
    loads(server.url + "/model.safetensors.index.json?download=true")
    one = ns.read_header(server.url + "/model-00001-of-00002.safetensors?token=x")
    assert list(one) == list(TENSORS)[:6]
    write(server.directory / "model.safetensors", TENSORS)
    os.unlink(server.directory / "model.safetensors.index.json")
    loads(server.url)


def test_headers_alone_travel_for_headers_and_few_requests_for_tensors(server):
    found = ns.read_header(server.url)
    assert {n: i.shape for n, i in found.items()} == {n: x.shape for n, x in TENSORS.items()}
    assert all(i.file.startswith(server.url) for i in found.values())
    assert server.data_bytes() == 0
    loads(server.url)
    total = sum(x.nbytes for x in TENSORS.values())
    assert server.data_bytes() == total
    assert sum(start > 2000 or stop - start > 2000 for _, start, stop in server.sent) == 2


def test_the_command_line_reads_headers_alone(server, capsys):
    assert main(["explain", server.url, "--mesh", "data=2", "--map", "a=data"]) == 0
    assert "t00" in capsys.readouterr().out
    assert server.data_bytes() == 0


def test_only_the_ranges_that_are_wanted_travel(server):
    some = {n: TENSORS[n] for n in ("t01", "t03", "t09")}
    tree = ns.load_safetensors(server.url, structs(some), unexpected="ignore")
    assert {n: bits(x) for n, x in tree.items()} == {n: bits(x) for n, x in some.items()}
    assert server.data_bytes() == sum(x.nbytes for x in some.values())


def test_failed_requests_are_tried_again(server):
    def every_third(handler: Any, number: int) -> bool:
        if number % 3 == 0:
            handler.reply(503, b"", True)
        return number % 3 == 0

    server.trouble = every_third
    loads(server.url)

    def cut_every_third(handler: Any, number: int) -> bool:
        if number % 3 == 0:
            handler.close_connection = True
        return number % 3 == 0

    server.trouble = cut_every_third
    loads(server.url)


def test_a_server_that_stays_in_trouble_is_an_error_that_says_so(server):
    found = ns.read_header(server.url)

    def no_tensors(handler: Any, number: int) -> bool:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        if wanted and int(wanted[1]) >= found["t00"].start:
            handler.reply(500, b"", True)
            return True
        return False

    server.trouble = no_tensors
    with nothing_moved(), pytest.raises(ns.CheckpointError) as error:
        ns.load_safetensors(server.url, structs({"t00": TENSORS["t00"]}), unexpected="ignore")
    start, stop = found["t00"].start, found["t00"].stop
    assert str(error.value) == (
        f"{server.url}/model-00001-of-00002.safetensors (bytes {start} to {stop}) cannot be read after 5 attempts:"
        " HTTP status 500"
    )


def test_a_server_that_refuses_is_an_error_and_a_store_that_cannot_be_listed_is_none(server):
    def forbidden(handler: Any, number: int) -> bool:
        handler.reply(403, b"", True)
        return True

    server.trouble = forbidden
    for url in (server.url + "/", server.url + "/model-00001-of-00002.safetensors"):
        with pytest.raises(ns.CheckpointError) as error:
            ns.read_header(url)
        first = url if url.endswith(".safetensors") else url + "model.safetensors.index.json"
        assert str(error.value) == f"{first} cannot be read: HTTP status 403"

    def forbidden_where_there_is_nothing(handler: Any, number: int) -> bool:
        name = handler.path.lstrip("/")
        if not name or not (server.directory / name).exists():
            handler.reply(403, b"", True)
            return True
        return False

    write(server.directory / "model.safetensors", TENSORS)
    os.unlink(server.directory / "model.safetensors.index.json")
    server.trouble = forbidden_where_there_is_nothing
    loads(server.url)


def test_a_server_without_ranges_and_missing_files_are_errors(server):
    def whole(handler: Any, number: int) -> bool:
        if handler.path.endswith(".safetensors") and handler.command == "GET":
            handler.reply(200, (server.directory / handler.path.lstrip("/")).read_bytes(), True)
            return True
        return False

    server.trouble = whole
    with pytest.raises(ns.CheckpointError) as error:
        ns.read_header(server.url)
    size = (server.directory / "model-00001-of-00002.safetensors").stat().st_size
    assert f"the server ignores byte ranges: asked for 8 bytes, it sent {size}" in str(error.value)
    server.trouble = lambda handler, number: False
    with pytest.raises(ns.CheckpointError) as error:
        ns.read_header(server.url + "/absent.safetensors")
    assert str(error.value) == f"{server.url}/absent.safetensors cannot be opened: no such file"
    (server.directory / "empty").mkdir()
    with pytest.raises(ns.CheckpointError, match="holds no checkpoint"):
        ns.read_header(server.url + "/empty")
    with pytest.raises(ns.CheckpointError) as error:
        ns.read_header("nosuchprotocol://x/model.safetensors")
    assert str(error.value).startswith("nosuchprotocol://x/model.safetensors cannot be opened: Protocol not known")


def test_an_index_cannot_lead_to_another_server_or_out_of_its_directory(server):
    inside = server.directory / "sub"
    inside.mkdir()
    for entry in ("../model-00001-of-00002.safetensors", "%2e%2e/x.safetensors", "http://127.0.0.1:1/x", "/x"):
        (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t00": entry}}))
        with pytest.raises(ns.HeaderError, match="the index names files that may not be read"):
            ns.read_header(server.url + "/sub")


def test_short_rows_are_not_asked_for_one_by_one(server):
    value = counting(4000, 8)
    write(server.directory / "wide.safetensors", {"x": value})
    half = NamedSharding(mesh((1, 2), "a b", devices=M8.devices), P(None, "b"))
    tree = ns.load_safetensors(
        server.url + "/wide.safetensors", {"x": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=half)}
    )
    assert bits(tree["x"]) == bits(value)
    assert server.data_bytes() == value.nbytes
    assert len(server.sent) == 3


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    moto = ThreadedMotoServer(port=0)
    moto.start()
    host, port = moto.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
    client.create_bucket(Bucket="models")
    yield client
    client.close()
    moto.stop()


def test_a_checkpoint_in_s3(tmp_path, s3):
    for path in write_sharded(tmp_path / "m", FILES).iterdir():
        s3.upload_file(str(path), "models", f"org/name/{path.name}")
    loads("s3://models/org/name", mesh=M8)
    loads("s3://models/org/name/model.safetensors.index.json")
    s3.upload_file(str(write(tmp_path / "a.safetensors", TENSORS)), "models", "alone/adapter_model.safetensors")
    loads("s3://models/alone")
    with pytest.raises(ns.CheckpointError, match="holds no checkpoint"):
        ns.read_header("s3://models/nothing")
    with pytest.raises(ns.CheckpointError, match=r"s3://models/x\.safetensors cannot be opened: no such file"):
        ns.read_header("s3://models/x.safetensors")


def test_other_protocols_of_fsspec_work_too(tmp_path):
    import fsspec

    directory = write_sharded(tmp_path / "m", FILES)
    loads(f"file://{directory}")
    memory = fsspec.filesystem("memory")
    for path in directory.iterdir():
        memory.pipe_file(f"/models/m/{path.name}", path.read_bytes())
    loads("memory://models/m")


def test_without_fsspec_the_error_names_the_extra():
    script = """
        import sys
        sys.modules["fsspec"] = sys.modules["fsspec.core"] = None
        import namedshard as ns
        try:
            ns.read_header("http://127.0.0.1:9/model.safetensors")
        except ns.CheckpointError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "reading from URLs needs fsspec, which is not installed\n  fix: pip install 'namedshard[remote]'\n"
    )
