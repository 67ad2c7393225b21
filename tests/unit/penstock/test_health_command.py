"""``penstock health`` and what is no daemon: it says so, and leaves no connection open."""

from __future__ import annotations

import gc
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from click.testing import CliRunner

from penstock.cli.main import main


class _Stranger(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"x" * 100_000
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_another_server_is_no_daemon() -> None:
    with HTTPServer(("127.0.0.1", 0), _Stranger) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        result = CliRunner().invoke(main, ["health", f"127.0.0.1:{server.server_port}"])
        thread.join(60)
    assert result.exit_code == 3
    assert "is no daemon of Penstock (HTTP status 404)" in result.output
    del result
    gc.collect()  # an open connection would be a warning, which is an error


def test_what_does_not_answer_is_told_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    result = CliRunner().invoke(main, ["health", address])
    assert result.exit_code == 3
    assert f"no daemon answers at http://{address}/health: Connection refused; " in result.output
