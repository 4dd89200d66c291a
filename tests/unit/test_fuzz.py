"""A few seconds of fuzzing in every run of the suite, and what the fuzzer itself must be able to find."""

import json

import pytest
from tests.fuzz import run, targets
from tests.fuzz.bodies import seeds


def test_strange_bodies_get_no_answer_but_the_contracts() -> None:
    report = run.fuzz(0, bodies=15_000, seconds=8)
    assert report.errors == []
    assert report.bodies > 500
    # Half of it noise would test the first line of the decoder only.
    assert 0.1 < report.taken / report.bodies < 0.9


def test_every_seed_is_tried_as_it_is() -> None:
    assert len(seeds()) > 50
    for body in seeds():
        targets.try_body(body)


def test_an_error_out_of_contract_is_reported_with_its_body(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def decode(body: bytes) -> None:
        raise KeyError(len(body))

    monkeypatch.setattr(targets, "decode_outcome", decode)
    report = run.fuzz(0, bodies=3, seconds=5)
    assert len(report.errors) == 3
    assert "KeyError" in report.errors[0]
    assert "body: " in report.errors[0]
    assert run.summarize(0, [report], []) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["unexpected_errors"] == 3
