"""How large anything in a body may be. The only place where these numbers stand.

`inputs`, `rank`, `params` and `text_bytes` are written into the schema of version 1: a deployment may tighten them, not
widen them, because the other side would refuse what it is sent.
"""

from dataclasses import dataclass, fields
from typing import Final

_FIXED_BY_VERSION_1: Final = frozenset({"inputs", "rank", "params", "text_bytes"})


@dataclass(frozen=True, slots=True)
class Limits:
    """Ceilings for one body.

    Args:
        body_bytes: of the whole AMQP body. RabbitMQ 4 refuses above 16 MiB by default, 3.10 above 128 MiB.
        bundle_jobs: jobs (or results) in one body.
        inputs: tensors of one job, or outputs of one result.
        rank: axes of one tensor.
        params: entries of a job's `params`.
        text_bytes: UTF-8 length of one text in `params`.
        containers: maps and arrays in one body. A full bundle of 256 jobs with 64 inputs each has about 33,000.
        items: entries of all maps and arrays in one body, and so the number of texts that string tensors may hold. An
            entry can cost 60 bytes of memory for 3 bytes of body.
        claim_check_bytes: above this a tensor should travel as a `ref`. A recommendation: nothing is refused for it.
    """

    body_bytes: int = 8 * 2**20
    bundle_jobs: int = 256
    inputs: int = 64
    rank: int = 8
    params: int = 32
    text_bytes: int = 4096
    containers: int = 2**16
    items: int = 2**18
    claim_check_bytes: int = 256 * 2**10

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"limits.{field.name} must be at least 1")
            ceiling = field.default if field.name in _FIXED_BY_VERSION_1 else None
            if ceiling is not None and getattr(self, field.name) > ceiling:
                raise ValueError(f"limits.{field.name} is at most {ceiling}: version 1 of the contract fixes it")


DEFAULT_LIMITS: Final = Limits()
