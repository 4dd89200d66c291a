"""Names of the Redis keys and channels that both sides use: those of one job, and what operators paused.

The client leaves inputs and reads outcomes, the worker reads inputs and writes outcomes.
The job id stands in braces, so that on a Redis Cluster all keys of one job live in one slot and one pipeline reaches
them. The prefix is configuration, one per tenant or environment.
"""

__all__ = ["done_channel", "input_key", "output_key", "paused_key", "result_key"]


def result_key(prefix: str, job_id: str) -> str:
    """Key of the one canonical outcome of a job (see `inferq.outcome`)."""
    return f"{prefix}:{{{job_id}}}:result"


def done_channel(prefix: str, job_id: str) -> str:
    """Pub/sub channel on which a stored outcome is hinted at; a hint may be lost, the key is the truth."""
    return f"{prefix}:{{{job_id}}}:done"


def input_key(prefix: str, job_id: str, name: str) -> str:
    """Key of the raw bytes of a large input; the only `ref` a worker resolves for that job and input."""
    return f"{prefix}:{{{job_id}}}:in:{name}"


def output_key(prefix: str, job_id: str, name: str) -> str:
    """Key of the raw bytes of a large output; the only `ref` a client resolves for that job and output."""
    return f"{prefix}:{{{job_id}}}:out:{name}"


def paused_key(prefix: str) -> str:
    """Hash of the pauses of operators (see `inferq.pauses`)."""
    return f"{prefix}:paused"
