"""The story that the demo tells, part by part: fallback, deadline, a few hundred answers, summary.

Each part prints what it shows and notes what had to hold. Starts the workers itself and ends them.
"""

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from infra.demo import inputs, model, report, samples
from infra.demo.asking import LOG_FOLDER, Asked, ask_all, feed, save_inputs
from infra.demo.errors import DemoError
from infra.demo.model import MODEL, PROJECT_FOLDER, FetchedModel
from infra.demo.parking import Parked, find_parked
from infra.demo.place import Place, own_place
from infra.demo.report import Checks, heading, say
from infra.demo.samples import Sample
from infra.demo.workers import Launch, Worker, running_worker

from inferq import Client, InferqError, JobFailed
from inferq.settings import ClientSettings, ConfigurationError, load_settings

_FALLBACK_DEADLINE_S = 5.0
_HOPELESS_DEADLINE_S = 1.0
_PARKED_LIMIT_S = 15.0


async def tell() -> int:
    """Tell the whole story; returns the exit status."""
    settings = load_settings(ClientSettings)
    fetched = await asyncio.to_thread(fetch_model)
    labels = inputs.Labels.read(fetched.labels_file)
    files = [*samples.repository_files(), *samples.generated_files()]
    checks = Checks()
    LOG_FOLDER.mkdir(parents=True, exist_ok=True)
    async with own_place(settings) as place:
        launch = Launch(fetched.models_folder, LOG_FOLDER, {**os.environ, **place.variables})
        with model_queues(launch.environment):
            asked = await ask(place, launch, files, labels, checks)
    show_answers(asked, files, checks)
    return summarize(asked, checks)


async def ask(place: Place, launch: Launch, files: Sequence[Sample], labels: inputs.Labels, checks: Checks) -> Asked:
    """The part of the story for which workers live: with the CPU role alone, then with both."""
    async with Client(place.settings) as client, running_worker("cpu", launch):
        await show_fallback(client, labels, checks)
        await show_deadline(client, place.broker_url, checks)
        async with running_worker("gpu", launch) as worker:
            introduce(worker)
            say(f"{len(files)} files; from a shell: inferq submit --model {MODEL} {shown(save_inputs(files))}")
            return await ask_all(client, files, labels)


def fetch_model() -> FetchedModel:
    """Have the model, and say where from."""
    heading("The model: magika, which tells file types")
    fetched = model.fetch()
    say(f"{'in' if fetched.was_cached else 'downloaded to'} {shown(fetched.models_folder / MODEL)}")
    return fetched


@contextlib.contextmanager
def model_queues(environment: Mapping[str, str]) -> Iterator[None]:
    """Create the model's queues as an operator does, and remove what was created: the vhost may be a lasting one."""
    heading(f"$ inferq topology add-model {MODEL}")
    added = topology("add-model", environment)
    for line in added.stdout.splitlines():
        say(line)
    if added.returncode != 0:
        raise DemoError(f"the queues of the model could not be created: {added.stderr.strip()}")
    try:
        yield
    finally:
        if "created queue" in added.stdout:
            topology("remove-model", environment)


def topology(command: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `inferq topology COMMAND MODEL`."""
    words = [sys.executable, "-m", "inferq", "topology", command, MODEL]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


async def show_fallback(client: Client, labels: inputs.Labels, checks: Checks) -> None:
    """No GPU-role worker lives, so the broker moves the job to the CPU role before its deadline."""
    heading(f"1. Only the CPU role runs; a job has {_FALLBACK_DEADLINE_S:.0f} s")
    source = samples.own_source()
    answer = await client.infer(MODEL, feed(source.content), deadline_s=_FALLBACK_DEADLINE_S)
    verdict = labels.verdict(answer.outputs[inputs.OUTPUT][0])
    timing, served_by = answer.result.timing_ms, answer.result.served_by
    role = served_by.role if served_by else "nobody"
    say(f"{source.name}: {verdict.label} ({verdict.score:.3f}), fallback: {str(answer.result.fallback).lower()}")
    if timing is not None:
        say(f"{timing.broker:.0f} ms with the broker, which moved it on; {timing.run:.0f} ms running")
    checks.check(
        "answered by the CPU role with fallback: true", holds=answer.result.fallback and role == "cpu", found=role
    )
    checks.check(f"{source.name} is python", holds=verdict.label == "python", found=verdict.label)


async def show_deadline(client: Client, broker_url: str, checks: Checks) -> None:
    """A job that only a GPU worker may answer, while there is none, is refused in time and parked."""
    heading(f"2. A job has {_HOPELESS_DEADLINE_S:.0f} s and forbids the CPU fallback")
    job_id = await client.submit(
        MODEL, feed(b"nobody will ever look at this"), deadline_s=_HOPELESS_DEADLINE_S, fallback="never"
    )
    try:
        await client.result(job_id, timeout_s=_PARKED_LIMIT_S)
        code = "no error"
    except JobFailed as error:
        code = error.code
        say(f"answered: {error.code}: {error.message}")
    parked = await wait_until_parked(broker_url, job_id)
    if parked is not None:
        say(f"in inferq.parking: job {parked.job_id}, key {parked.routing_key}, reason {parked.reason}")
    checks.check("answered deadline_exceeded", holds=code == "deadline_exceeded", found=code)
    checks.check(
        "shown in parking with that reason", holds=parked is not None and parked.reason == code, found="it is not there"
    )
    await find_parked(broker_url, job_id, remove=True)


async def wait_until_parked(broker_url: str, job_id: str) -> Parked | None:
    """A job is parked a moment after it is answered."""
    give_up_s = time.monotonic() + _PARKED_LIMIT_S
    while time.monotonic() < give_up_s:
        parked = await find_parked(broker_url, job_id)
        if parked is not None:
            return parked
        await asyncio.sleep(0.2)
    return None


def introduce(worker: Worker) -> None:
    """Say what the GPU-role worker really runs on, in its own words."""
    ready, degraded = worker.event("model.ready") or {}, worker.event("model.degraded")
    heading(f"3. A GPU-role worker starts; it runs on {ready.get('provider', 'an unknown provider')}")
    if degraded is not None:
        say(str(degraded.get("reason")))


def show_answers(asked: Asked, files: Sequence[Sample], checks: Checks) -> None:
    """The table, the histogram, and the known answers."""
    heading("Answers")
    lines = report.table_lines(asked.rows)
    (LOG_FOLDER / "answers.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for line in report.table_lines(report.excerpt(asked.rows)):
        print(line)
    say(f"? = the model is not sure. All {len(asked.rows)} lines: {shown(LOG_FOLDER / 'answers.txt')}")
    heading("Batches")
    report.print_histogram(asked.rows)
    heading("Known answers")
    for kind, rows in report.by_expected(asked.rows).items():
        wrong = [f"{row.sample.name} is {row.verdict.label}" for row in rows if not row.right]
        checks.check(f"{kind}: {len(rows) - len(wrong)} of {len(rows)}", holds=not wrong, found=", ".join(wrong))
    missing = len(files) - len(asked.rows)
    checks.check("every file was answered", holds=missing == 0, found="; ".join(asked.problems[:3]))


def summarize(asked: Asked, checks: Checks) -> int:
    """The figures, the verdict, and the exit status."""
    heading("Summary")
    jobs, mean_rows = len(asked.rows), report.mean_batch_rows(asked.rows)
    if jobs:
        by_cpu = sum(row.result.fallback for row in asked.rows)
        say(f"{jobs} jobs in {asked.took_s:.1f} s: {jobs / asked.took_s:.0f} jobs/s, {mean_rows:.1f} rows a batch")
        say(f"answered by the CPU role: {by_cpu}")
        for lane, rows in (("interactive", asked.one_by_one), ("bulk", asked.in_bundles)):
            say(f"{lane + ',':<12} {len(rows):>4} jobs: {report.percentiles([row.total_ms for row in rows])}")
    say(f"checks: {checks.passed} passed, {checks.failed} failed")
    return 1 if checks.failed else 0


def shown(path: Path) -> Path:
    """A path as a person in the project's folder would type it."""
    return path.relative_to(PROJECT_FOLDER)


async def _run() -> int:
    """End on SIGTERM as on Ctrl-C: by cancelling, so that the workers drain and the queues are removed."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await tell()


def main() -> int:
    """Run the demo; returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows question marks for the bars
    try:
        return asyncio.run(_run())
    except (DemoError, InferqError, ConfigurationError) as reason:
        print(f"demo: {reason}", file=sys.stderr)
        return 2
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
