"""Names of the Redis keys and channels that both sides use: those of one job, and what operators paused.

The client leaves inputs and reads outcomes, the worker reads inputs and writes outcomes.
The job id stands in braces, so that on a Redis Cluster all keys of one job live in one slot and one pipeline reaches
them. The prefix is configuration, one per tenant or environment.
"""

import re
from typing import Final

__all__ = ["done_channel", "input_key", "is_at", "output_key", "paused_key", "result_key"]

_MARK: Final = re.compile(r":[0-9a-f]{32}")


def result_key(prefix: str, job_id: str) -> str:
    """Key of the one canonical outcome of a job (see `inferq.outcome`)."""
    return f"{prefix}:{{{job_id}}}:result"


def done_channel(prefix: str, job_id: str) -> str:
    """Pub/sub channel on which a stored outcome is hinted at; a hint may be lost, the key is the truth."""
    return f"{prefix}:{{{job_id}}}:done"


def input_key(prefix: str, job_id: str, name: str, mark: str = "") -> str:
    """Key of the raw bytes of a large input; a worker resolves no other `ref` for that job and input.

    The mark, 32 hexadecimal digits, tells contents apart: then the job's digest does so too, in which the `ref` stands,
    and another sender's job of the same id leaves these bytes alone.
    """
    return _marked(f"{prefix}:{{{job_id}}}:in:{name}", mark)


def output_key(prefix: str, job_id: str, name: str, mark: str = "") -> str:
    """Key of the raw bytes of a large output; a client resolves no other `ref` for that job and output.

    The mark, 32 hexadecimal digits, is one attempt's own: what another attempt computed is not overwritten.
    """
    return _marked(f"{prefix}:{{{job_id}}}:out:{name}", mark)


def is_at(ref: str | None, key: str) -> bool:
    """Whether a `ref` is this key, with a mark or without."""
    return ref is not None and ref.startswith(key) and (ref == key or _MARK.fullmatch(ref, len(key)) is not None)


def _marked(key: str, mark: str) -> str:
    return f"{key}:{mark}" if mark else key


def paused_key(prefix: str) -> str:
    """Hash of the pauses of operators (see `inferq.pauses`)."""
    return f"{prefix}:paused"
