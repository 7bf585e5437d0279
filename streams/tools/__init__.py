"""What customers give us to call: executors of tools, MCP servers, callbacks of workflows.

    egress      the one client all of it goes through: addresses, deadlines, sizes, places
    http        the executor that is posted a turn's tool calls and answers them all
    mcp         the executor that is an MCP server
    callback    the callback of a workflow

An executor has `run(turn)`, which returns the contents for the model in the order of the calls, and `close`.
Both are used for one record by one task. What goes wrong is a `ToolFailed`, whose text is meant for the
customer's error line: it says what failed, and never a URL or a secret.
"""
