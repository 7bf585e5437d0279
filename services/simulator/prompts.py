"""Reading a request as the simulated model does: which model, how many words, what was asked last.

A "token" of the simulator is a word, a maximal run of characters that are not white space: `usage` counts
the words of every message and of the answer. It is a count anybody can repeat, not what a tokenizer gives.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

MARKER_CHARS = 80


class BadRequest(Exception):
    """The request is not one that an OpenAI-compatible server takes; the message says why."""


class _Part(msgspec.Struct):
    text: str = ""


class _Function(msgspec.Struct, frozen=True):
    name: str = "function"
    parameters: dict[str, Any] = {}


class _Tool(msgspec.Struct):
    function: _Function = _Function()


class _CallReference(msgspec.Struct):
    id: str


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_CallReference] | None = None
    tool_call_id: str | None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return " ".join(part.text for part in self.content)
        return self.content or ""


class _Chat(msgspec.Struct):
    model: str
    messages: list[_Message]
    tools: list[_Tool] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None


class _Completion(msgspec.Struct):
    model: str
    prompt: str | list[str | int | list[int]] = ""
    max_tokens: int | None = None
    stream: bool | None = None


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What matters of one request."""

    model: str
    chat: bool
    texts: tuple[str, ...]
    """The last user message; for completions one text for each prompt of the request."""
    words: int
    max_words: int | None
    rounds: int = 0
    """Rounds of tool calls that the history holds since the last user message, all of them answered."""
    tool_content: str = ""
    """Content of the last tool message."""
    functions: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Name and parameter schema of every function in `tools`."""

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def marker(self) -> str:
        """The start of the last user message, by which the call log and the counts name the call."""
        return self.text[:MARKER_CHARS]

    def digest(self) -> str:
        """Equal for equal texts in equal rounds: what a call counts as a repetition of."""
        return hashlib.blake2b(f"{self.rounds}\n{self.text}".encode(), digest_size=8).hexdigest()


_chat_decoder = msgspec.json.Decoder(_Chat)
_completion_decoder = msgspec.json.Decoder(_Completion)


def read_chat(body: bytes) -> Prompt:
    """The prompt of a chat request. Raises `BadRequest`."""
    try:
        request = _chat_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The request body is not a chat completion request: {error}.") from error
    if not request.messages:
        raise BadRequest("`messages` is empty.")
    _refuse_stream(request.stream)
    words = 0
    last = tool_content = ""
    rounds = 0
    unanswered: set[str] = set()
    for message in request.messages:
        text = message.text()
        words += len(text.split())
        if message.role == "tool":
            if message.tool_call_id not in unanswered:
                raise BadRequest(f"Tool message for {message.tool_call_id!r} answers no open tool call.")
            unanswered.discard(message.tool_call_id)
            tool_content = text
            continue
        if unanswered:
            raise BadRequest(f"Tool calls without a tool message: {', '.join(sorted(unanswered))}.")
        if message.role == "user":
            last, rounds = text, 0
        elif message.tool_calls:
            rounds += 1
            unanswered = {call.id for call in message.tool_calls}
    if unanswered:
        raise BadRequest(f"Tool calls without a tool message: {', '.join(sorted(unanswered))}.")
    return Prompt(
        model=request.model,
        chat=True,
        texts=(last,),
        words=words,
        max_words=request.max_completion_tokens or request.max_tokens,
        rounds=rounds,
        tool_content=tool_content,
        functions=tuple((tool.function.name, tool.function.parameters) for tool in request.tools or ()),
    )


def read_completion(body: bytes) -> Prompt:
    """The prompt of a text completion request. Raises `BadRequest`."""
    try:
        request = _completion_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The request body is not a completion request: {error}.") from error
    _refuse_stream(request.stream)
    texts, words = _texts(request.prompt)
    return Prompt(model=request.model, chat=False, texts=texts, words=words, max_words=request.max_tokens)


def _texts(prompt: str | list[str | int | list[int]]) -> tuple[tuple[str, ...], int]:
    """The texts of a prompt and its words. Lists of token numbers have no text; each number is a word."""
    if isinstance(prompt, str):
        return (prompt,), len(prompt.split())
    if not prompt or all(isinstance(item, int) for item in prompt):
        return ("",), len(prompt)
    texts = tuple(item if isinstance(item, str) else "" for item in prompt)
    words = sum(len(item) for item in prompt if isinstance(item, list))
    return texts, words + sum(len(text.split()) for text in texts)


def _refuse_stream(stream: bool | None) -> None:
    if stream:
        raise BadRequest("The simulator does not stream; leave `stream` out.")
