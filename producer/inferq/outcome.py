"""The record stored under `result_key`: a job's one canonical outcome, and what it is the outcome of.

The worker writes it with `SET ... NX GET`, the client reads it, and a client that cancels writes one too. The digest
says which content (model, version, inputs, params) was answered: the same id with another digest is a conflict.
"""

from dataclasses import dataclass
from typing import Final

import msgpack

from inferq_schemas import ContractError, Result, result_from_wire, result_to_wire

__all__ = ["DIGEST_BYTES", "Outcome", "decode_outcome"]

DIGEST_BYTES: Final = 16
_DIGEST_KEY: Final = "d"
_RESULT_KEY: Final = "r"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A stored outcome.

    Attributes:
        digest: `Job.digest()` of the job that was answered, 16 bytes; None when the writer did not see the job's
            content (a cancellation), and then it agrees with any.
        result: the answer every later reader gets.
    """

    digest: bytes | None
    result: Result

    @classmethod
    def cancelled(cls, job_id: str) -> "Outcome":
        """The outcome a client stores (with NX) so that the job is answered before it runs."""
        return cls(None, Result.failed(job_id, "cancelled", "the job was cancelled before an answer was stored"))

    def agrees_with(self, digest: bytes) -> bool:
        """Whether this is an outcome of the content with that digest; False means the id was used twice."""
        return self.digest is None or self.digest == digest

    def encode(self) -> bytes:
        """Pack to the stored form, a msgpack map `{"d": digest or nil, "r": result map}`."""
        packed: bytes = msgpack.packb({_DIGEST_KEY: self.digest, _RESULT_KEY: result_to_wire(self.result)})
        return packed


def decode_outcome(raw: bytes) -> Outcome:
    """Read a stored outcome.

    Raises:
        ContractError: code "malformed"; the value under the key is not an outcome, so the prefix is shared with
            another program or the value was damaged.
    """
    try:
        record = msgpack.unpackb(raw, raw=False, strict_map_key=True, use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise ContractError("malformed", f"stored outcome is not msgpack: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get(_RESULT_KEY), dict):
        raise ContractError("malformed", 'stored outcome is not a map with a result map under "r"')
    digest = record.get(_DIGEST_KEY)
    if digest is not None and not (isinstance(digest, bytes) and len(digest) == DIGEST_BYTES):
        raise ContractError("malformed", f'stored outcome has under "d" neither nil nor {DIGEST_BYTES} bytes')
    return Outcome(digest, result_from_wire(record[_RESULT_KEY]))
