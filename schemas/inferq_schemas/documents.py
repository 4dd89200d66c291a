"""The contract as documents for other languages: JSON Schema of a job and of a result, and AsyncAPI 3.0.

Written from the types and the topology, never by hand: `python -m inferq_schemas.documents --write`. The only module of
this package that touches files, and nothing imports it.
"""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from inferq_schemas import topology
from inferq_schemas.codec import ACCEPT_BUNDLE_HEADER, ATTEMPT_HEADER, CONTENT_TYPE
from inferq_schemas.errors import ERROR_CODES
from inferq_schemas.job import MODEL_PATTERN, Job
from inferq_schemas.limits import DEFAULT_LIMITS
from inferq_schemas.result import BATCH_REASONS, BatchInfo, ErrorInfo, Result, ServedBy, Timing
from inferq_schemas.tensor import Tensor

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_DESCRIBED: Final = (Job, Result, Tensor, ErrorInfo, ServedBy, Timing, BatchInfo)


def job_schema() -> dict[str, Any]:
    """JSON Schema of one job; what a schema cannot say (equal rows, data that fits its shape) stands in its texts."""
    return _schema(Job, "urn:inferq:schema:job:1")


def result_schema() -> dict[str, Any]:
    """JSON Schema of one result. Readers ignore keys that it does not name."""
    return _schema(Result, "urn:inferq:schema:result:1")


def _schema(kind: type[Any], identifier: str) -> dict[str, Any]:
    schema = TypeAdapter(kind).json_schema()
    _describe({kind.__name__: schema, **schema.get("$defs", {})})
    return {"$schema": _DIALECT, "$id": identifier, **schema}


def _component_schemas() -> dict[str, Any]:
    adapters = [(kind, "validation", TypeAdapter[Any](kind)) for kind in (Job, Result)]
    _, document = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type] # list widens the Literal
    schemas: dict[str, Any] = document["$defs"]
    _describe(schemas)
    return schemas


def _describe(schemas: Mapping[str, dict[str, Any]]) -> None:
    """Put the docstrings where they belong: the first paragraphs at the type, each of `Args` at its property."""
    for kind in _DESCRIBED:
        if (schema := schemas.get(kind.__name__)) is None:
            continue
        text, arguments = _docstring(kind)
        schema["description"] = text
        for name, prop in schema["properties"].items():
            prop.pop("title", None)
            if "patternProperties" in prop:
                prop["additionalProperties"] = False
            if prop.get("default", ...) is None:
                del prop["default"]
            if name in arguments:
                prop["description"] = arguments[name]
    if "ErrorInfo" in schemas:
        schemas["ErrorInfo"]["properties"]["code"]["examples"] = sorted(ERROR_CODES)
    if "BatchInfo" in schemas:
        schemas["BatchInfo"]["properties"]["reason"]["examples"] = list(BATCH_REASONS)


def _docstring(kind: type[Any]) -> tuple[str, dict[str, str]]:
    text, *sections = re.split(r"\n\n(?=(?:Args|Raises):\n)", inspect.getdoc(kind) or "")
    arguments = next((section for section in sections if section.startswith("Args:")), "")
    entries = re.findall(r"^    (\w+): (.+(?:\n {8,}.+)*)", arguments, flags=re.MULTILINE)
    return _one_line(text), {name: _one_line(words) for name, words in entries}


def _one_line(text: str) -> str:
    return " ".join(text.split())


def asyncapi() -> dict[str, Any]:
    """AsyncAPI 3.0 document of a worker: what it receives, what it sends, and on which exchanges and queues."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "inferq",
            "version": "1",
            "description": "Inference jobs by message queue. Bodies are msgpack; schemas show bin as base64.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": CONTENT_TYPE,
        "channels": _channels(),
        "operations": _operations(),
        "components": {"messages": _messages(), "schemas": _component_schemas()},
    }


def _channels() -> dict[str, Any]:
    by_name = {exchange.name: exchange for exchange in topology.Topology().exchanges}
    keyed = "Routing key of a job; it stays the same through every dead-letter hop."
    lane = {"address": "{model}.{lane}", "parameters": _parameters(), "description": keyed}
    return {
        "jobs": {**lane, "messages": _refs("job"), "bindings": _exchange(by_name[topology.JOBS_EXCHANGE])},
        "fallback": {**lane, "messages": _refs("job"), "bindings": _exchange(by_name[topology.FALLBACK_EXCHANGE])},
        "replies": {
            "address": None,
            "description": "The queue that the job's reply_to names, through the default exchange.",
            "messages": _refs("result"),
        },
        "dead": {
            "address": topology.DEAD_QUEUE,
            "description": "Jobs that the broker dead-lettered, expired or delivered too often. Answered, then parked.",
            "messages": _refs("job"),
            "bindings": _queue(topology.DEAD_QUEUE),
        },
        "parking": {
            "address": topology.PARKING_QUEUE,
            "description": "Failed jobs for operators to look at; bounded, the oldest go first.",
            "messages": _refs("job"),
            "bindings": _queue(topology.PARKING_QUEUE),
        },
    }


def _parameters() -> dict[str, Any]:
    lanes = ", ".join(topology.DEFAULT_LANES)
    return {
        "model": {"description": f"Name of the model, {MODEL_PATTERN}"},
        "lane": {"description": f"Lane, {topology.LANE_PATTERN}; by default one of {lanes}"},
    }


def _refs(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/messages/{name}"} for name in names}


def _exchange(exchange: topology.Exchange) -> dict[str, Any]:
    described = {"name": exchange.name, "type": exchange.type, "durable": True, "autoDelete": False, "vhost": "/"}
    return {"amqp": {"is": "routingKey", "exchange": described, "bindingVersion": "0.3.0"}}


def _queue(name: str) -> dict[str, Any]:
    described = {"name": name, "durable": True, "exclusive": False, "autoDelete": False, "vhost": "/"}
    return {"amqp": {"is": "queue", "queue": described, "bindingVersion": "0.3.0"}}


def _operations() -> dict[str, Any]:
    def channel(name: str) -> dict[str, str]:
        return {"$ref": f"#/channels/{name}"}

    reply = {"channel": channel("replies"), "address": {"location": "$message.header#/reply_to"}}
    return {
        "serveJob": {
            "action": "receive",
            "channel": channel("jobs"),
            "summary": "Batch, run, answer, acknowledge.",
            "bindings": {"amqp": {"ack": True, "bindingVersion": "0.3.0"}},
            "reply": reply,
        },
        "divertJob": {"action": "send", "channel": channel("fallback"), "summary": "The GPU misses the deadline."},
        "serveOnCpu": {"action": "receive", "channel": channel("fallback"), "reply": reply},
        "buryJob": {"action": "receive", "channel": channel("dead"), "reply": reply},
        "parkJob": {"action": "send", "channel": channel("parking")},
    }


def _messages() -> dict[str, Any]:
    properties = {
        "correlation_id": {"type": "string", "description": "AMQP property; the reply carries it again."},
        "reply_to": {"type": "string", "description": "AMQP property; where the answer goes."},
        "expiration": {"type": "string", "description": "AMQP property; ms until the broker moves the job on."},
        "message_id": {"type": "string", "description": "AMQP property; another one for every publish."},
        "traceparent": {"type": "string", "description": "W3C trace context."},
        ACCEPT_BUNDLE_HEADER: {"type": "string", "enum": ["bundle"], "description": "Replies may come as an array."},
        ATTEMPT_HEADER: {"type": "integer", "minimum": 1},
    }
    correlation = {"location": "$message.header#/correlation_id"}
    result_headers = {"type": "object", "properties": {"correlation_id": properties["correlation_id"]}}
    return {
        "job": {
            "title": "One job, or a bundle of jobs of one model",
            "contentType": CONTENT_TYPE,
            "correlationId": correlation,
            "headers": {"type": "object", "properties": properties},
            "payload": _one_or_many("Job"),
            "bindings": {"amqp": {"messageType": "inferq.job", "bindingVersion": "0.3.0"}},
        },
        "result": {
            "title": "One result, or an array where the job's message accepts bundles",
            "contentType": CONTENT_TYPE,
            "correlationId": correlation,
            "headers": result_headers,
            "payload": _one_or_many("Result"),
        },
    }


def _one_or_many(name: str) -> dict[str, Any]:
    one = {"$ref": f"#/components/schemas/{name}"}
    return {"oneOf": [one, {"type": "array", "minItems": 1, "maxItems": DEFAULT_LIMITS.bundle_jobs, "items": one}]}


DOCUMENTS: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {
    "json/job.schema.json": job_schema,
    "json/result.schema.json": result_schema,
    "asyncapi.json": asyncapi,
}


def render(document: Mapping[str, Any]) -> str:
    """The text of a document, the same for equal contents."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def outdated(folder: Path) -> list[str]:
    """Paths, relative to the folder, of the documents that are missing or differ from what the types say."""
    found = {path: folder / path for path in DOCUMENTS}
    return [
        path
        for path, file in found.items()
        if not file.is_file() or file.read_text(encoding="utf-8") != render(DOCUMENTS[path]())
    ]


def write(folder: Path) -> None:
    """Write all documents below a folder."""
    for path, build in DOCUMENTS.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(render(build()), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the documents; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m inferq_schemas.documents", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="write the documents")
    mode.add_argument("--check", action="store_true", help="fail if a document is not what the types say")
    default = Path(__file__).resolve().parents[1]
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="default: schemas/ of the checkout")
    options = parser.parse_args(arguments)
    if options.write:
        write(options.folder)
    stale = outdated(options.folder)
    for path in stale:
        sys.stderr.write(f"{options.folder / path}: not current; run python -m inferq_schemas.documents --write\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
