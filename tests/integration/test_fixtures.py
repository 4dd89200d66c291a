"""The fixtures themselves: what other tests rely on without looking."""

import redis
from tests.stack import Broker, Stack

from inferq_schemas import ModelTopology, Topology


def test_a_test_gets_a_vhost_that_takes_the_topology(broker: Broker) -> None:
    broker.load(Topology([ModelTopology("mnist")]).definitions(broker.vhost))

    assert broker.queue("inferq.mnist.bulk")["arguments"] == {"x-queue-type": "quorum"}


def test_a_test_gets_a_key_prefix_on_a_recent_redis(stack: Stack, redis_prefix: str) -> None:
    with redis.Redis.from_url(stack.redis_url) as client:
        client.set(f"{redis_prefix}:a", b"1", ex=60)

        assert client.get(f"{redis_prefix}:a") == b"1"
        assert client.info("server")["redis_version"] >= "7"
