"""The callback of a two-step workflow: summarize the parts of a text, then the summaries.

    python examples/workflow_callback.py 9003

A record whose body is `{"model": …, "openrelay": {"workflow": {"url": "http://127.0.0.1:9003/", "context":
{"parts": ["…", "…"]}}}}` ends with one line that holds the summary of the summaries. The callback keeps
nothing: what it needs to know comes with each call, so it may be called again after a crash.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def request(name: str, prompt: str) -> dict[str, Any]:
    return {"id": name, "body": {"messages": [{"role": "user", "content": prompt}]}}


def content(result: dict[str, Any]) -> str:
    return str(result["response"]["body"]["choices"][0]["message"]["content"])


def next_step(asked: dict[str, Any]) -> dict[str, Any]:
    """Map, then reduce, then done."""
    match asked["step"]:
        case 0:
            parts = asked["context"]["parts"]
            requests = [request(f"part-{i}", f"Summarize: {part}") for i, part in enumerate(parts)]
            return {"status": "continue", "requests": requests}
        case 1:
            summaries = [content(each) for each in asked["results"] if each["status"] == "succeeded"]
            joined = "\n".join(summaries)
            requests = [request("whole", f"Summarize {len(summaries)} summaries:\n{joined}")]
            return {"status": "continue", "requests": requests}
    (whole,) = asked["results"]
    if whole["status"] == "failed":
        return {"status": "failed", "error": {"message": "the summaries could not be summarized"}}
    return {"status": "completed", "output": {"summary": content(whole)}}


class Callback(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(next_step(asked)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Callback).serve_forever()
