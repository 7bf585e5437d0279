"""How executors fail, and what they are sent in every request."""

from __future__ import annotations

from streams.core.toolconfig import ToolConfig, WorkflowConfig


class ToolFailed(Exception):
    """A record's tools could not be run; the text is for its error line, without URLs or secrets."""


def headers(config: ToolConfig | WorkflowConfig) -> dict[str, str]:
    """JSON both ways, and the customer's own Authorization, verbatim."""
    sent = {"Content-Type": "application/json", "Accept": "application/json"}
    if config.authorization is not None:
        sent["Authorization"] = config.authorization
    return sent
