"""Topics as they are now, read once from their beginning."""

from __future__ import annotations

from types import TracebackType

from schemas.settings import Kafka
from streams.kafka.admin import Admin
from streams.kafka.messages import Message
from streams.kafka.reader import PositionReader

READ_TIMEOUT_S = 120.0
CLIENT_ID = "openrelay-operator"


class Log:
    """A context manager. Every call blocks and raises KafkaFailed when the cluster does not answer."""

    def __init__(self, kafka: Kafka) -> None:
        self.admin = Admin(kafka, CLIENT_ID)
        self._reader = PositionReader(kafka, CLIENT_ID, 1)

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()

    def partition(self, topic: str, partition: int, first: int = 0, end: int | None = None) -> list[Message]:
        """Everything a partition holds now, from offset `first` on and below `end`."""
        place = (topic, partition)
        start = max(first, self.admin.first_offsets([place])[place])
        if end is None:
            end = self.admin.end_offsets([place])[place]
        return self._reader.read_to_end(topic, partition, start, end, READ_TIMEOUT_S)

    def one(self, topic: str, partition: int, offset: int) -> Message:
        """The first record at or behind an offset."""
        return self._reader.read(topic, partition, offset, 1 << 62, most=1, timeout_s=10.0)[0]
