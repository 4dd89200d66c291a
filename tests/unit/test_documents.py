"""The documents for other languages: current, valid, and true to the golden bytes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from inferq_schemas import ERROR_CODES, LANE_PATTERN
from inferq_schemas.documents import DOCUMENTS, asyncapi, job_schema, main, outdated, result_schema

SCHEMAS = Path(__file__).parents[2] / "schemas"
INDEX: list[dict[str, Any]] = json.loads((SCHEMAS / "vectors" / "index.json").read_text(encoding="utf-8"))


def bodies(schema_of: str) -> list[Any]:
    found = []
    for entry in INDEX:
        decoded = entry.get("decoded", entry.get("reads_as"))
        if decoded is None or ("result" in entry["kind"]) is not (schema_of == "result"):
            continue
        found += [pytest.param(one, id=entry["name"]) for one in (decoded if isinstance(decoded, list) else [decoded])]
    return found


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(reference := node.get("$ref"), str):
            yield reference
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_the_committed_documents_are_what_the_types_say() -> None:
    assert outdated(SCHEMAS) == []


def test_a_document_that_is_not_current_fails_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", str(tmp_path)]) == 1
    assert main(["--write", str(tmp_path)]) == 0
    assert main(["--check", str(tmp_path)]) == 0
    capsys.readouterr()
    (tmp_path / "asyncapi.json").write_text("{}")
    assert main(["--check", str(tmp_path)]) == 1
    complaint = capsys.readouterr().err
    assert "asyncapi.json: not current; run python -m inferq_schemas.documents --write" in complaint
    assert len(complaint.splitlines()) == 1


@pytest.mark.parametrize("build", [job_schema, result_schema])
def test_the_schemas_are_valid_schemas(build: Any) -> None:
    Draft202012Validator.check_schema(build())


@pytest.mark.parametrize("body", bodies("job"))
def test_golden_jobs_fit_the_schema(body: Any) -> None:
    Draft202012Validator(job_schema()).validate(body)


@pytest.mark.parametrize("body", bodies("result"))
def test_golden_results_fit_the_schema(body: Any) -> None:
    Draft202012Validator(result_schema()).validate(body)


@pytest.mark.parametrize(
    "change",
    [
        {"id": "a b"},
        {"v": 2},
        {"priority": 1},
        {"inputs": {}},
        {"inputs": {"a\nb": {"dtype": "int8", "shape": [1], "data": ""}}},
        {"inputs": {"x": {"dtype": "int9", "shape": [1], "data": ""}}},
        {"inputs": {"x": {"dtype": "int8", "shape": [-1], "data": ""}}},
        {"inputs": {"x": {"dtype": "int8", "shape": [1]}}},
        {"inputs": {"x": {"dtype": "int8", "shape": [1], "data": "", "ref": "k"}}},
        {"params": {"p": {}}},
        {"fallback": "maybe"},
    ],
)
def test_the_job_schema_refuses_what_the_contract_refuses(change: dict[str, Any]) -> None:
    good = next(entry["decoded"] for entry in INDEX if entry["name"] == "v1-job-minimal")
    assert not Draft202012Validator(job_schema()).is_valid(good | change)


def test_every_property_is_described_from_the_docstrings() -> None:
    schema = job_schema()
    assert schema["description"] == "A request to run one model on `rows` rows."
    for part in (schema, schema["$defs"]["Tensor"], result_schema()):
        assert [name for name, prop in part["properties"].items() if not prop.get("description")] == []


def test_readers_in_other_languages_find_all_codes() -> None:
    assert set(result_schema()["$defs"]["ErrorInfo"]["properties"]["code"]["examples"]) == ERROR_CODES


def test_every_reference_of_the_asyncapi_document_resolves() -> None:
    document = asyncapi()
    found = set(references(document))
    assert found
    for reference in found:
        node = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_the_asyncapi_document_names_the_channels_of_the_topology() -> None:
    document = asyncapi()
    assert document["asyncapi"] == "3.0.0"
    assert list(document["channels"]) == ["jobs", "fallback", "replies", "dead", "parking"]
    jobs = document["channels"]["jobs"]
    assert jobs["bindings"]["amqp"]["exchange"]["name"] == "inferq.jobs"
    assert jobs["address"] == "{model}.{lane}"
    assert LANE_PATTERN in jobs["parameters"]["lane"]["description"]
    assert document["channels"]["dead"]["bindings"]["amqp"]["queue"]["name"] == "inferq.dead"
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_the_three_documents_have_fixed_places() -> None:
    assert list(DOCUMENTS) == ["json/job.schema.json", "json/result.schema.json", "asyncapi.json"]
