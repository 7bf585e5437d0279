"""An MCP server with one tool, made with the official SDK (`pip install mcp`).

    python examples/mcp_server.py 9002

Give a record `"openrelay": {"tool_config": {"type": "mcp", "url": "http://127.0.0.1:9002/mcp"}}`.
"""

import keyword
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("words", log_level="WARNING")


@server.tool()
def is_keyword(word: str) -> str:
    """Whether a word is a keyword of Python."""
    return f"{word} is {'a' if keyword.iskeyword(word) else 'no'} keyword"


if __name__ == "__main__":
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]), stateless_http=True)
