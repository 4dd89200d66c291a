"""Where the records of a run are that its checkpoint does not have."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tests.parked_messages import message_of

from inferq.checkpoint import Checkpoint
from inferq.commands.reconciling import report
from inferq.errors import AnswerLost
from inferq.outputs import open_output
from inferq.parking import parked
from inferq.progress import Progress
from inferq.reconcile import Account, reconcile
from inferq.records import Reading
from inferq.sources import Sources
from inferq.submission import Submission
from inferq_schemas import Result, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OUTPUT = Tensor.from_numpy(np.array([[1]]))


class Outcomes:
    """The part of the store that knows outcomes."""

    def __init__(self, *results: Result) -> None:
        self.results = {result.id: result for result in results}

    async def read(self, job_ids: Sequence[str]) -> tuple[Result, ...]:
        return tuple(self.results[job_id] for job_id in job_ids if job_id in self.results)

    async def fetch_output(self, job_id: str, name: str, tensor: Tensor) -> Tensor:
        del name, tensor
        raise AnswerLost(f"output of {job_id} has expired")


async def look(folder: Path, store: Outcomes, *parked_ids: str) -> tuple[Account, Submission]:
    """One look at six records with ids a to e, of which the last is no job."""
    lines = [json.dumps({"inputs": {"x": [[1]]}, "id": name}) for name in "abcde"]
    (folder / "in.jsonl").write_text("\n".join([*lines, "no job"]))
    sources = Sources([folder / "in.jsonl"], Reading({}), 1)
    there = parked(message_of(b"", headers={"inferq-reason": "overloaded"}))
    with (
        Checkpoint(folder / "run.ckpt", {"model": "m"}) as remembered,
        open_output(folder / "out.jsonl", remembered) as output,
        Submission(sources, output, Progress(None), remembered) as submission,
    ):
        account = await reconcile(submission, cast("Any", store), dict.fromkeys(parked_ids, there))
    return account, submission


async def test_each_record_is_fetched_parked_or_unknown_and_a_second_look_fetches_nothing_again(tmp_path: Path) -> None:
    store = Outcomes(
        Result("a", "ok", {"y": OUTPUT}),
        Result.failed("b", "overloaded", "too much"),
        Result("c", "ok", {"y": Tensor(dtype="int64", shape=(1, 1), ref="gone")}),
    )
    account, _ = await look(tmp_path, store, "b", "d")

    assert account.fetched == {"ok": 1, "overloaded": 1}
    assert (account.parked, account.unfit) == ({"overloaded": 1}, 1)
    assert (account.unknown, account.examples) == (2, ["c", "e"])
    assert account.failed == 3

    again, submission = await look(tmp_path, store, "b", "d")
    assert (again.fetched.total(), again.unknown, submission.tally.skipped) == (0, 2, 3)
    written = [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {"a", "b"} < set(written)
    assert len(written) == 3


def test_the_report_names_what_is_unknown_and_what_to_do() -> None:
    account = Account(unknown=2, examples=["c", "e"], unfit=1)
    account.fetched.update({"ok": 1, "overloaded": 1})
    account.parked.update({"internal": 4})
    text = "\n".join(report(account, before=7, waiting={"inferq.m.bulk": 3}))

    assert "7 answered before, 2 fetched now (1 ok, overloaded 1), 1 no job" in text
    assert "4 parked (internal 4), 2 unknown" in text
    assert "such as c, e" in text
    assert "inferq.m.bulk holds 3 messages" in text
    assert "without --reconcile" in text
    assert len(report(Account(), before=7, waiting={})) == 1
