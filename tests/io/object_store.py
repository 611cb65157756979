"""A bucket on this machine, behind a proxy that fails on demand."""

import http.client
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = "dumps"
SECRETS = {"AWS_ACCESS_KEY_ID": "AKIDNEVERSHOWN", "AWS_SECRET_ACCESS_KEY": "secret-never-shown"}
RESET, CUT = "reset", "cut"


class Proxy(ThreadingHTTPServer):
    """Pass requests on. The next requests that match `method` and `key` fail as `faults` lists: an error status, RESET,
    or CUT in half.

    `always` makes all such requests fail, and `log` contains method, path and range of each request.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behind = port
        self.lock = threading.Lock()
        self.heal()

    def heal(self) -> None:
        self.faults: list[Any] = []
        self.always: Any = None
        self.method, self.key = "GET", ""
        self.log: list[tuple[str, str, str]] = []

    def fault(self, method: str, path: str) -> Any:
        with self.lock:
            if method != self.method or self.key not in path:
                return None
            return self.faults.pop(0) if self.faults else self.always

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is none of our business."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body in two packets take 40 ms per request
    server: Proxy

    def _pass_on(self) -> None:
        self.server.log.append((self.command, self.path, self.headers.get("Range", "")))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault(self.command, self.path)
        if fault == RESET:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        if isinstance(fault, tuple):
            self._answer(fault[0], {}, _xml(fault[1]))
            return
        behind = http.client.HTTPConnection("127.0.0.1", self.server.behind)
        behind.request(self.command, self.path, body, dict(self.headers))
        answer = behind.getresponse()
        content = answer.read()
        self._answer(answer.status, dict(answer.getheaders()), content, cut=fault == CUT)
        behind.close()

    def _answer(self, status: int, headers: dict[str, str], content: bytes, cut: bool = False) -> None:
        self.send_response(status)
        length = headers.get("Content-Length") or headers.get("content-length") or str(len(content))
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "server", "date"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = _pass_on  # noqa: N815

    def log_message(self, *words: Any) -> None:
        """Quiet."""


def _xml(code: str) -> bytes:
    words = f"<Code>{code}</Code><Message>of {SECRETS['AWS_ACCESS_KEY_ID']}</Message>"
    return f'<?xml version="1.0" encoding="UTF-8"?><Error>{words}<RequestId>1</RequestId></Error>'.encode()


@contextmanager
def bucket() -> Iterator[tuple[Proxy, Any]]:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
    )
    client.create_bucket(Bucket=BUCKET)
    proxy = Proxy(port)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    yield proxy, client
    proxy.shutdown()
    proxy.server_close()
    client.close()
    server.stop()
