"""Says how a run ended: examples of what is wrong, where the logs are, how to do it again, and figures as JSON."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from tests.chaos.servers import keep_logs

if TYPE_CHECKING:
    from tests.chaos.run import Options, Outcome

_EXAMPLE_CHARACTERS = 600


def report(outcome: Outcome, options: Options, *, again: str, keep: bool) -> None:
    """Print it, the figures last; ledger and logs stay if a promise was broken.

    Args:
        again: the command that does the same run.
        keep: leave ledger and logs of a good run too.
    """
    figures = _figures(outcome)
    evidence = json.dumps({**figures, "examples": outcome.verdict.examples}, indent=1)
    (options.folder / "verdict.json").write_text(evidence)
    for fault, examples in outcome.verdict.examples.items():
        for example in examples:
            print(f"{fault}: {json.dumps(example)[:_EXAMPLE_CHARACTERS]}")
    for reason in outcome.not_injected:
        print(f"not injected: {reason}")
    if outcome.failed:
        keep_logs(options.folder)
    if outcome.failed or keep:
        print(f"ledger and logs: {options.folder}\nagain: {again}")
    else:
        shutil.rmtree(options.folder)
    print(json.dumps(figures))


def _figures(outcome: Outcome) -> dict[str, Any]:
    # Not asdict, which cannot copy a Counter.
    figures = {field.name: getattr(outcome.verdict, field.name) for field in fields(outcome.verdict)}
    del figures["examples"]
    return {
        **figures,
        "faults": outcome.injected,
        "not_injected": len(outcome.not_injected),
        "worker_ends": outcome.ends,
        "load_s": round(outcome.load_s, 1),
        "goodput_per_s": round(outcome.verdict.ok / outcome.load_s, 1),
    }
