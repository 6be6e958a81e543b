"""A server of chat completions for tests: a real one, over HTTP, that does whatever a test tells it to."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def completion(content, finish_reason="stop", **message):
    message = {"role": "assistant", "content": content, **message}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}


class ChatServer(ThreadingHTTPServer):
    """Answers by `script(body, number of the request)`: a completion, or (status, headers, bytes), or None to hang."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = lambda body, number: completion(f"answer to {asked(body)}")
        self.bodies, self.headers, self.times = [], [], []
        self.at_once = self.most_at_once = 0
        self.lock, self.closing = threading.Lock(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        pass  # a client that hangs up


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.headers.append(dict(self.headers))
            server.times.append(time.monotonic())
            number = len(server.bodies)
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        found = server.script(body, number) if self.path == "/v1/chat/completions" else (404, {}, b"nothing here")
        if found is None:
            server.closing.wait()
        with server.lock:
            server.at_once -= 1
        if found is None:
            return
        status, headers, content = (200, {}, json.dumps(found).encode()) if isinstance(found, dict) else found
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def asked(body):
    return body["messages"][-1]["content"]
