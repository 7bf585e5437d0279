"""Two of three brokers are down while batches are created."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from schemas.ids import BatchId
from schemas.settings import Kafka, Pool
from tests.api.conftest import api_settings
from tests.api.host import ACME, Host, error, order, record
from tests.stages.conftest import LIMITS
from tests.support.check import check_batch
from tests.support.cluster import Cluster
from tests.support.pipeline import Pipeline
from tests.support.simulator import Simulator
from tests.support.until import until

DOWN_S = 20.0
RECORDS = 50
ANSWER_S = 30.0
"""A create waits for its claim, its input and its fact, each for at most ten seconds."""

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
def host(tmp_path: Path, cluster: Cluster, simulator: Simulator) -> Iterator[Host]:
    kafka = Kafka(bootstrap=cluster.bootstrap, replication_factor=3, partitions=4, request_partitions=4)
    settings = api_settings(cluster, tmp_path, kafka=kafka, limits=LIMITS)  # type: ignore[arg-type]
    pools = (Pool(base_url=simulator.url, max_concurrency=20),)
    models = {name: msgspec.structs.replace(model, pools=pools) for name, model in settings.models.items()}
    running = Host(tmp_path / "api", msgspec.structs.replace(settings, models=models)).start()
    try:
        yield running
    finally:
        running.kill()


def test_two_of_three_brokers_are_down_at_create(
    tmp_path: Path, cluster: Cluster, host: Host, simulator: Simulator
) -> None:
    """503 while too few copies can be kept; what was refused never runs, what is tried again runs once."""
    simulator.control(latency_ms=0, reset=True)

    def create(client: httpx.Client, name: str) -> httpx.Response:
        requests = [
            record(f"{name}-{i}", messages=[{"role": "user", "content": f"ok quorum {name} {i}"}])
            for i in range(RECORDS)
        ]
        body = order(requests=requests)
        return client.post("/v1/batches", json=body, headers={"Idempotency-Key": name})

    def alive() -> bool:
        """True, once the API serves; a supervisor would have started it again."""
        if host.child is None or host.child.poll() is not None:
            host.child = None
            host.start()
        return True

    accepted: dict[str, str] = {}
    with host.client(ACME) as client:
        answer = create(client, "before")
        accepted["before"] = answer.raise_for_status().json()["id"]
        cluster.kill(2)
        cluster.kill(3)
        ends = time.monotonic() + DOWN_S
        refused = []
        while time.monotonic() < ends:
            name = f"down{len(refused)}"
            began = time.monotonic()
            answer = create(client, name)
            assert time.monotonic() - began < ANSWER_S
            assert answer.status_code == 503, answer.text
            assert error(answer)["code"] == "unavailable"
            assert 0 < int(answer.headers["retry-after"]) <= 60
            refused.append(name)
        cluster.start(2, 3)

        def created(name: str) -> str | None:
            alive()
            try:
                answer = create(client, name)
            except httpx.TransportError:
                return None
            return answer.json()["id"] if answer.status_code == 200 else None

        for name in ("after", refused[0]):
            accepted[name] = until(lambda name=name: created(name), 90, f"{name} cannot be created")  # type: ignore[misc]
    stages = Pipeline(tmp_path, host.settings)
    try:
        stages.start("dispatch", "settle", "sink")
        for name, batch in accepted.items():
            until(
                lambda batch=batch: (  # type: ignore[misc]
                    alive() and stages.revived() and stages.state(BatchId(batch)).ended is not None
                ),
                90,
                lambda batch=batch: f"{stages.explain(BatchId(batch))}\n{host.log.read_text()[-3000:]}",  # type: ignore[misc]
            )
            output = stages.lines(BatchId(batch), "output")
            check_batch(stages.state(BatchId(batch)), [f"{name}-{i}" for i in range(RECORDS)], output, [])
        with host.client(ACME) as client:
            listed = client.get("/v1/batches").raise_for_status().json()["data"]
        assert {each["id"] for each in listed} == set(accepted.values())
        # What was refused and not tried again is withdrawn: nothing of it is open, nothing was called.
        open_ = [b for b, state in stages.states.items() if not state.withdrawn and state.ended is None]
        assert open_ == []
        prompts = Counter(simulator.calls()["prompts"])
        assert set(prompts) == {f"ok quorum {name} {i}" for name in accepted for i in range(RECORDS)}
        assert set(prompts.values()) == {1}
    finally:
        stages.close()
