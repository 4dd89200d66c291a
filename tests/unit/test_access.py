"""The roles as data: what their patterns match. Whether servers obey is for the integration tests."""

import re

import pytest

from inferq.redis_access import REDIS_USERS, acl_lines
from inferq_schemas import ModelTopology, Role, Topology, hardened_definitions, roles

ALL = {role.user: role for role in roles()}
ONE = {role.user: role for role in roles([ModelTopology("iris"), ModelTopology("a-b", ("x",))])}


def takes(pattern: str, name: str) -> bool:
    return re.search(pattern, name) is not None


@pytest.mark.parametrize("role", [*ALL.values(), *ONE.values()], ids=lambda role: role.user)
def test_no_role_may_write_to_the_default_exchange_or_touch_what_is_not_ours(role: Role) -> None:
    for pattern in (role.configure, role.write, role.read):
        for name in ("amq.default", "amq.topic", "orders", "xinferq.jobs", "inferq.jobsx", "inferqxjobs", "reply."):
            assert not takes(pattern, name)


@pytest.mark.parametrize(
    "key", ["iris", "iris.", ".bulk", "iris.*", "#", "*.bulk", "iris.fallback", "iris.bulk.x", "Iris.bulk", "iris.b\nx"]
)
def test_routing_keys_that_are_no_lane_are_nobodys(key: str) -> None:
    for role in (*ALL.values(), *ONE.values()):
        assert not any(takes(pattern, key) for pattern in role.topics.values())


def test_listed_models_are_the_only_ones_for_clients_and_workers() -> None:
    keys = ONE["inferq-client"].topics["inferq.jobs"]
    assert [takes(keys, key) for key in ("iris.bulk", "a-b.x", "a-b.bulk", "bert.bulk")] == [True, True, False, False]
    queues = ("inferq.iris.bulk", "inferq.iris.fallback", "inferq.a-b.x", "inferq.bert.bulk", "inferq.dead")
    assert [takes(ONE["inferq-gpu"].read, name) for name in queues] == [True, True, True, False, True]
    assert [takes(ONE["inferq-cpu"].read, name) for name in queues] == [False, True, False, False, True]
    assert takes(ALL["inferq-gpu"].read, "inferq.bert.bulk")


def test_a_user_without_a_password_hash_gets_none() -> None:
    content = hardened_definitions(Topology(), "v", password_hashes={"inferq-gpu": "hash"})
    found = {user["name"]: user["password_hash"] for user in content["users"]}
    assert found == dict.fromkeys(ALL, "") | {"inferq-gpu": "hash"}
    assert {entry["vhost"] for entry in content["permissions"] + content["topic_permissions"]} == {"v"}


def test_redis_users_are_those_of_the_broker_but_for_the_topologys() -> None:
    assert set(REDIS_USERS) == ALL.keys() - {"inferq-topology"}
    lines = acl_lines("tenant.a", password_hashes={"inferq-gpu": "0" * 64})
    assert lines[0] == "user default off resetkeys resetchannels -@all"
    gpu = next(line for line in lines if line.startswith("user inferq-gpu "))
    assert "#" + "0" * 64 in gpu
    assert "~tenant.a:{*}:result" in gpu
    assert all("nopass" not in line and "+@all" not in line for line in lines)
    assert sum("resetpass" in line for line in lines) == len(REDIS_USERS) - 1
