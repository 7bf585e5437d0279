"""An HTTP executor of tools: it counts the lines of modules of Python's standard library.

    python examples/tool_executor.py 9001

Point a record's `openrelay.tool_config.url` at http://127.0.0.1:9001/ (while trying things out, allow that
address in the settings: `[egress]`). A tool call may come twice after a crash, so answering has no effects.
"""

import importlib.util
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def count_lines(module: str) -> str:
    """The only tool."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return f"there is no module {module}"
    return f"{module} has {len(Path(found.origin).read_bytes().splitlines())} lines"


class Executor(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        results = []
        for call in asked["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            results.append({"tool_call_id": call["id"], "content": count_lines(**arguments)})
        answer = json.dumps({"results": results}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Executor).serve_forever()
