"""Downloads: whole and right, or not at all, and an error that says what to do."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lockstep.data.download import RemoteFile, fetch
from lockstep.errors import DataError

CONTENT = bytes(range(256)) * 300


class Handler(BaseHTTPRequestHandler):
    """Serves ``/whole`` and ``/cut``, and notes what it was asked for."""

    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path not in ("/whole", "/cut"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT if self.path == "/whole" else CONTENT[:1000])

    def log_message(self, *arguments: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.address = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address where nobody listens."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}/whole"


def remote(*addresses: str, content: bytes = CONTENT) -> RemoteFile:
    return RemoteFile("file.gz", hashlib.md5(content).hexdigest(), addresses)


def test_a_file_arrives_whole_under_its_name(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "on the way"
    assert fetch([remote(f"{server.address}/whole")], folder) == [folder / "file.gz"]
    assert (folder / "file.gz").read_bytes() == CONTENT
    assert (folder / "file.gz").stat().st_mode & 0o444 == 0o444
    assert [path.name for path in folder.iterdir()] == ["file.gz"]


def test_a_file_that_is_there_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.gz").write_bytes(CONTENT)
    (tmp_path / "file.gz").chmod(0o600)
    assert fetch([remote(f"{server.address}/whole")], tmp_path) == [tmp_path / "file.gz"]
    assert server.asked == []
    assert (tmp_path / "file.gz").stat().st_mode & 0o777 == 0o600


def test_the_next_address_is_tried(server: Server, refusing: str, tmp_path: Path) -> None:
    file = remote(refusing, f"{server.address}/absent", f"{server.address}/whole")
    assert fetch([file], tmp_path)[0].read_bytes() == CONTENT
    assert server.asked == ["/absent", "/whole"]


@pytest.mark.parametrize(
    ("path", "content", "reason"),
    [
        ("/whole", b"another", f"expected md5 {hashlib.md5(b'another').hexdigest()}, got"),
        ("/absent", CONTENT, "HTTP Error 404: Not Found"),
        ("/cut", CONTENT, "expected 76800 bytes, got 1000"),
    ],
)
def test_after_a_failure_nothing_stays(
    server: Server, tmp_path: Path, path: str, content: bytes, reason: str
) -> None:
    folder = tmp_path / "made" / "on the way"
    with pytest.raises(DataError) as caught:
        fetch([remote(f"{server.address}{path}", content=content)], folder)
    message = str(caught.value)
    assert message.startswith(
        f"{folder / 'file.gz'}: cannot be downloaded ({server.address}{path}: "
    )
    assert reason in message
    assert f"Put file.gz into {folder} yourself" in message and "--data-dir" in message
    assert list(tmp_path.iterdir()) == []


def test_what_was_whole_before_a_failure_stays(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    good = RemoteFile("good", hashlib.md5(CONTENT).hexdigest(), (f"{server.address}/whole",))
    with pytest.raises(DataError, match=r"file\.gz: cannot .* Put good, file\.gz into"):
        fetch([good, remote(f"{server.address}/absent")], folder)
    assert [path.name for path in folder.iterdir()] == ["good"]


def test_a_network_that_is_not_there(refusing: str, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=rf"\({refusing}: \[Errno \d+\] Connection refused\)\. Put file\.gz into"
    ):
        fetch([remote(refusing)], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        DataError, match="file/x: expected a folder to download into, got Not a directory"
    ):
        fetch([remote("http://127.0.0.1/unused")], tmp_path / "file" / "x")


def test_several_at_once_download_once(server: Server, tmp_path: Path) -> None:
    together = threading.Barrier(4)
    found: list[list[Path]] = []

    def ask() -> None:
        together.wait()
        found.append(fetch([remote(f"{server.address}/whole")], tmp_path))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[tmp_path / "file.gz"]] * 4
    assert server.asked == ["/whole"]


def test_nothing_is_printed_where_there_is_no_terminal(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fetch([remote(f"{server.address}/whole")], tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_a_progress_bar(
    server: Server,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    fetch([remote(f"{server.address}/whole")], tmp_path)
    out, err = capfd.readouterr()
    assert out == ""
    assert "file.gz" in err and "76.8/76.8 kB" in err
