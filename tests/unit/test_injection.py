"""Names that mean something to AMQP, Redis or a shell: refused where they come in, or harmless where they go."""

from collections.abc import Callable

import pytest
from pydantic import ValidationError
from tests.bodies import job_body

from inferq.errors import InvalidJob
from inferq.jobs import JobOptions, build_job
from inferq.keys import input_key
from inferq.names import lane_problem, model_problem
from inferq.results import check_id
from inferq.settings import BrokerSettings, RedisSettings
from inferq_schemas import ContractError, RejectedJob, decode_jobs, lane_queue, parse_routing_key, routing_key
from inferq_worker.publish import ReplyAllowList

STRANGE = [
    *("a.b", "a.*", "#", "*", "a.#", "a b", "a\n", "\na", "a\0b", "a\r\nDEL x", "?", "[a]", "a{b}", "}:x:{", "..", "/"),
    *("a/b", "", " ", "é", "a" * 129, "a" * 70_000, "\ud800", "\u202e", "%00", "$(id)", "`id`", ";", "'", '"', "\\"),
]
IN_IDS = {"a.b", ".."}  # a dot is a letter of an id, and of no pattern of Redis
DEFAULT = (r"amq\.rabbitmq\.reply-to\..+", r"amq\.gen-.+", r"reply\..+")


@pytest.mark.parametrize("text", STRANGE, ids=ascii)
@pytest.mark.parametrize(
    "make",
    [
        lambda text: routing_key(text, "bulk"),
        lambda text: routing_key("iris", text),
        lambda text: lane_queue(text, "bulk"),
        lambda text: parse_routing_key(f"iris.{text}"),
        lambda text: parse_routing_key(f"{text}.bulk"),
    ],
    ids=["model of a key", "lane of a key", "model of a queue", "lane in a key", "model in a key"],
)
def test_no_strange_name_becomes_part_of_a_routing_key_or_queue(text: str, make: Callable[[str], object]) -> None:
    with pytest.raises(ContractError, match="malformed"):
        make(text)


@pytest.mark.parametrize("text", STRANGE, ids=ascii)
def test_a_client_refuses_strange_models_lanes_and_ids(text: str) -> None:
    assert model_problem(text)
    assert lane_problem(text)
    inputs = {"x": [[1.0]]}
    with pytest.raises(InvalidJob):
        build_job(text, inputs, JobOptions(), now_ms=0)
    with pytest.raises(InvalidJob):
        build_job("iris", inputs, JobOptions(lane=text), now_ms=0)
    if text not in IN_IDS:
        with pytest.raises(InvalidJob):
            build_job("iris", inputs, JobOptions(), now_ms=0, job_id=text)
        with pytest.raises(InvalidJob, match="no job id"):
            check_id(text)


@pytest.mark.parametrize("text", [text for text in STRANGE if text != "\ud800"], ids=ascii)
def test_a_worker_refuses_strange_models_and_ids(text: str) -> None:
    for fields in [{"model": text}] + ([] if text in IN_IDS else [{"id": text}]):
        (entry,) = decode_jobs(job_body(**fields))
        assert isinstance(entry, RejectedJob)


@pytest.mark.parametrize("prefix", ["", "a b", "a*", "a?", "[a", "a{b}", "a\n", "a\0", "é", "a" * 65, "a\r\nDEL x"])
def test_no_prefix_means_something_in_a_pattern(prefix: str) -> None:
    with pytest.raises(ValidationError):
        RedisSettings(prefix=prefix)


def test_a_braced_input_name_stays_inside_its_own_jobs_keys() -> None:
    # The id has no brace, so whatever follows belongs to that id alone.
    assert input_key("p", "j", "x}:{other}:result").startswith("p:{j}:in:")


@pytest.mark.parametrize(
    "reply_to",
    ["inferq.iris.bulk", "inferq.dead", "reply.\n", "reply.a\nb", "reply", "xreply.a", "orders", "amq.topic", "reply."],
)
@pytest.mark.parametrize("exchange", ["", "inferq.replies"])
def test_answers_go_to_reply_queues_only(reply_to: str, exchange: str) -> None:
    assert not ReplyAllowList(DEFAULT, exchange=exchange).allows(reply_to)


def test_direct_reply_to_is_refused_where_answers_travel_through_an_exchange() -> None:
    address = "amq.rabbitmq.reply-to.g1h2"
    assert ReplyAllowList(DEFAULT).allows(address)
    hardened = ReplyAllowList(DEFAULT, exchange="inferq.replies")
    assert not hardened.allows(address)
    assert "bind it to inferq.replies" in hardened.refusal(address)


@pytest.mark.parametrize("url", ["amqp://h/?no_verify_ssl=1", "amqps://h/?cafile=/x", "amqp://h/?heartbeat=0"])
def test_no_option_of_the_brokers_url_turns_anything_off(url: str) -> None:
    with pytest.raises(ValidationError, match="would override the other knobs"):
        BrokerSettings.model_validate({"url": url})


@pytest.mark.parametrize("name", ["server_name"])
@pytest.mark.parametrize("value", ["a b", "a\n", "*", "a/b", ""])
def test_a_server_name_is_a_name(name: str, value: str) -> None:
    with pytest.raises(ValidationError):
        BrokerSettings.model_validate({"url": "amqps://h/", name: value})
