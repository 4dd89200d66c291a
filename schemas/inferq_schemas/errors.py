"""The closed list of error codes, and the one exception that the contract raises.

A code says what went wrong in terms a caller can act on; what then happens to a delivery is the worker's matter.
"""

from collections.abc import Mapping
from typing import Final, Literal, cast, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

ErrorCode = Literal[
    "malformed",
    "unsupported_version",
    "unknown_model",
    "invalid_input",
    "too_large",
    "deadline_exceeded",
    "overloaded",
    "inference_failed",
    "inference_timeout",
    "out_of_memory",
    "conflict",
    "cancelled",
    "internal",
]
ERROR_CODES: Final[frozenset[str]] = frozenset(get_args(ErrorCode))

MAX_MESSAGE_CHARS: Final = 500
_MAX_PATH_PART_CHARS: Final = 64
_TOO_LONG: Final = frozenset({"too_long", "string_too_long"})
_PROBLEMS: Final[Mapping[str, str]] = {
    "missing": "missing",
    "extra_forbidden": "unknown key; this version does not have it (workers are upgraded before clients)",
    "string_pattern_mismatch": "does not match {pattern}",
    "too_long": "more than {max_length} entries",
    "too_short": "needs at least {min_length} entry",
    "model_type": "must be a map",
    "dict_type": "must be a map",
}
_WRONG_KEYS: Final = frozenset({"missing", "extra_forbidden", "invalid_key"})


class ContractError(ValueError):
    """A body, a field or a tensor that breaks the wire contract.

    Args:
        code: what a caller can act on; goes into the answer as it is.
        message: what was wrong, where, and the mend. Cut to 500 characters; holds no payload.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        self.code: ErrorCode = code
        self.message = shorten(message)
        super().__init__(code, self.message)

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


def shorten(text: str, max_chars: int = MAX_MESSAGE_CHARS) -> str:
    """Cut a text that may hold a stranger's words to a bounded length."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


def fault(code: ErrorCode, where: str, problem: str) -> PydanticCustomError:
    """What a validator raises, so that `as_contract_error` finds the code and the field again."""
    return PydanticCustomError(code, "{problem}", {"where": where, "problem": problem})


def as_contract_error(error: ValidationError) -> ContractError:
    """Say the first problem of a failed validation in the contract's own words.

    An unknown version comes first, whatever else is wrong: a later version may differ everywhere.
    """
    details = error.errors(include_url=False, include_input=False)
    for detail in details:
        if detail["loc"] == ("v",) and detail["type"] in {"greater_than_equal", "less_than_equal"}:
            return ContractError("unsupported_version", "v: only contract version 1 is served here; send v = 1")
    first = details[0]
    message = f"{_path(first) or 'job'}: {_problem(first)}"
    others = len({_field(detail) for detail in details}) - 1
    return ContractError(
        _code(first, error.title), f"{shorten(message, 450)} (and {others} more)" if others else message
    )


def _field(detail: ErrorDetails) -> tuple[int | str, ...]:
    """The place of a problem, without the branches that pydantic appends: of a union, or the key of an entry."""
    place = detail["loc"][:-1] if detail["loc"][-1:] == ("[key]",) else detail["loc"]
    if place[:1] == ("inputs",):
        return place[:4] if place[2:3] == ("shape",) else place[:3]
    return place[:2] if place[:1] == ("params",) else place


def _path(detail: ErrorDetails) -> str:
    where = detail.get("ctx", {}).get("where")
    parts = [*_field(detail), *([where] if where else [])]
    return ".".join(shorten(_printable(str(part)), _MAX_PATH_PART_CHARS) for part in parts)


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)


def _problem(detail: ErrorDetails) -> str:
    kind = detail["type"]
    if kind in _PROBLEMS:
        return _PROBLEMS[kind].format_map(detail.get("ctx", {}))
    return f"{detail['msg'][:1].lower()}{detail['msg'][1:]}".replace("input should be", "must be")


def _code(detail: ErrorDetails, model: str) -> ErrorCode:
    kind = detail["type"]
    if kind in ERROR_CODES:
        return cast("ErrorCode", kind)
    if kind in _TOO_LONG:
        return "too_large"
    place = _field(detail)
    inside_tensor = model == "Tensor" or (place[:1] == ("inputs",) and len(place) > 2)
    return "invalid_input" if inside_tensor and kind not in _WRONG_KEYS else "malformed"
