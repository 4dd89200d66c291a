"""How long a batch runs, from the command line or from a worker that serves the model."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferq.commands import CommandError
from inferq_worker.scheduling import LatencyTable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TIMEOUT_S = 10.0
_MAX_STATUS_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Latency:
    """Run time by rows.

    Attributes:
        run_s: rows -> seconds.
        label: for people.
    """

    run_s: Callable[[int], float]
    label: str

    def rows_per_s(self, max_rows: int) -> float:
        """What a device does at best in batches of at most `max_rows` rows."""
        return max(rows / self.run_s(rows) for rows in range(1, max_rows + 1))


def parse_latency(text: str) -> Latency:
    """Read `linear:MS:MS_PER_ROW` or `table:ROWS=MS,ROWS=MS,...`.

    Raises:
        CommandError: the text says something else.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "linear":
            base_ms, row_ms = (float(number) for number in rest.split(":"))
            if min(base_ms, row_ms) >= 0 < base_ms + row_ms:
                return Latency(lambda rows: (base_ms + row_ms * rows) / 1000, f"{base_ms:g} ms + {row_ms:g} ms a row")
        elif kind == "table":
            pairs = (pair.split("=") for pair in rest.split(","))
            return _of_table({int(rows): float(ms) for rows, ms in pairs}, "")
    except ValueError:
        pass
    raise CommandError(
        f"--latency {text}: say linear:MS:MS_PER_ROW, as in linear:5:0.5, or table:ROWS=MS,..., as in table:1=5.5,32=21"
    )


def fetch_latency(source: str, model: str | None) -> Latency:
    """Read what a worker measured, from its `/status` or a file with such an answer.

    Args:
        source: an http or https URL, or a path.
        model: which of the worker's models; None = the only one.

    Raises:
        CommandError: it cannot be read, or holds no measurements of that model.
    """
    try:
        models: Mapping[str, Any] = json.loads(_read(source))["models"]
        tables = {name: state["run_ms_by_rows"] for name, state in models.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CommandError(f"{source} is not the /status of a worker") from error
    if model is None and len(tables) != 1:
        raise CommandError(f"{source} has the models {_names(tables)}: choose one with --model")
    name = model or next(iter(tables))
    if name not in tables:
        raise CommandError(f"{source} has no model {name!r}, but {_names(tables)}")
    if not tables[name]:
        raise CommandError(f"{source} has not measured any run of {name!r} yet")
    try:
        return _of_table({int(rows): float(ms) for rows, ms in tables[name].items()}, f"{name}, ")
    except (ValueError, TypeError, AttributeError) as error:
        raise CommandError(f"{source}: run_ms_by_rows of {name!r} is not rows to milliseconds") from error


def _of_table(ms_by_rows: Mapping[int, float], prefix: str) -> Latency:
    if not ms_by_rows or min(ms_by_rows) < 1 or min(ms_by_rows.values()) <= 0:
        raise ValueError("rows and milliseconds are positive")
    table = LatencyTable({rows: ms / 1000 for rows, ms in ms_by_rows.items()})
    sizes = ", ".join(f"{rows}={ms:.3g} ms" for rows, ms in sorted(ms_by_rows.items()))
    return Latency(lambda rows: table.predict(rows) or 0.0, prefix + sizes)


def _names(tables: Mapping[str, object]) -> str:
    return ", ".join(sorted(tables)) or "(none)"


def _read(source: str) -> bytes:
    try:
        if not source.startswith(("http://", "https://")):
            return Path(source).read_bytes()
        with _open(source) as answer:
            body: bytes = answer.read(_MAX_STATUS_BYTES)
            return body
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read {source}: {error}") from error


def _open(url: str) -> Any:
    return urllib.request.urlopen(url, timeout=_TIMEOUT_S)  # noqa: S310  # nosec B310  # http and https only
