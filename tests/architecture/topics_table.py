"""The table of topics as Markdown; run this module to write it into the documents that show it."""

from __future__ import annotations

import re
from pathlib import Path

from schemas.topics import CATALOGUE, Topic, requests_topic
from tests.support.command import ROOT

BEGIN, END = "<!-- topics -->", "<!-- /topics -->"
_BETWEEN = re.compile(re.escape(BEGIN) + r"\n.*?" + re.escape(END), re.DOTALL)
_COUNTED_BY = {"facts": "1", "results": "`kafka.partitions`", "requests": "`kafka.request_partitions`"}


def table() -> str:
    example = requests_topic("model")
    topics = [*CATALOGUE, _named(example, "requests.<model>")]
    rows = [
        "| topic | holds | written by | read by | key | partitions | kept |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows += [
        f"| `{topic.name}` | {topic.holds.replace('for model', 'for the model')} | {topic.owner} "
        f"| {', '.join(topic.readers)} | `{topic.key}` | {_COUNTED_BY[topic.partitions]} | {_kept(topic)} |"
        for topic in topics
    ]
    return "\n".join(rows)


def written(text: str) -> str:
    """A document with its table brought up to date."""
    return _BETWEEN.sub(lambda _: f"{BEGIN}\n{table()}\n{END}", text)


def documents() -> list[Path]:
    """The documents that show the table."""
    found = [ROOT / "README.md", *(ROOT / "streams").glob("*.md"), *(ROOT / "docs").glob("**/*.md")]
    return [path for path in found if path.exists() and BEGIN in path.read_text("utf-8")]


def _named(topic: Topic, name: str) -> Topic:
    return Topic(
        name=name,
        owner=topic.owner,
        readers=topic.readers,
        key=topic.key,
        holds=topic.holds,
        partitions=topic.partitions,
        config=topic.config,
    )


def _kept(topic: Topic) -> str:
    if topic.config["cleanup.policy"] == "compact":
        return "compacted"
    hours = int(topic.config["retention.ms"]) // 3_600_000
    return f"{hours} h" if hours < 96 else f"{hours // 24} days"


if __name__ == "__main__":
    for document in documents():
        document.write_text(written(document.read_text("utf-8")), "utf-8")
