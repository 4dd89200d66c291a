"""Turns the bytes of a file into what magika's model takes, and its scores into a file type.

Written against the `config.min.json` that comes with the model; a model of another shape is refused, not guessed at.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

INPUT, OUTPUT = "bytes", "target_label"
# What `features` is written for. Other values need other code, so they are compared, not used as parameters.
_WRITTEN_FOR = {
    "beg_size": 1024,
    "mid_size": 0,
    "end_size": 1024,
    "block_size": 4096,
    "padding_token": 256,
    "min_file_size_for_dl": 8,
    "use_inputs_at_offsets": False,
}
_SIDE, _BLOCK, _PADDING, _LEAST_BYTES = 1024, 4096, 256, 8


class UnknownModelError(Exception):
    """The model's configuration is not the one this module is written for."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the model says of one file.

    Attributes:
        label: magika's name of the type, such as `python`.
        score: of that label, 0 to 1.
        sure: whether the score reaches the threshold that magika itself asks of that label.
    """

    label: str
    score: float
    sure: bool


@dataclass(frozen=True, slots=True)
class Labels:
    """The model's labels, in the order of its scores, and the scores that count as sure."""

    names: tuple[str, ...]
    thresholds: dict[str, float]
    usual_threshold: float

    @classmethod
    def read(cls, path: Path) -> "Labels":
        """Read `config.min.json`.

        Raises:
            UnknownModelError: the model takes its input in another form.
        """
        config = json.loads(path.read_text(encoding="utf-8"))
        for key, value in _WRITTEN_FOR.items():
            if config.get(key) != value:
                raise UnknownModelError(f"{path}: {key} is {config.get(key)!r}, but inputs.py is written for {value!r}")
        return cls(tuple(config["target_labels_space"]), config["thresholds"], config["medium_confidence_threshold"])

    def verdict(self, scores: npt.NDArray[Any]) -> Verdict:
        """Read the scores of one file, float32 (labels,)."""
        best = int(scores.argmax())
        label, score = self.names[best], float(scores[best])
        return Verdict(label, score, score >= self.thresholds.get(label, self.usual_threshold))


def features(content: bytes) -> npt.NDArray[np.int32]:
    """Build the input of one file: int32 (1, 2048).

    1,024 bytes of the first block without leading white space, filled up at the end, then 1,024 of the last block
    without trailing white space, filled up at the front. A block is 4,096 bytes or the whole file; the filling is 256,
    which no byte is.
    """
    row = np.full((1, 2 * _SIDE), _PADDING, np.int32)
    begin = content[:_BLOCK].lstrip()[:_SIDE]
    end = content[-_BLOCK:].rstrip()[-_SIDE:]
    row[0, : len(begin)] = np.frombuffer(begin, np.uint8)
    row[0, 2 * _SIDE - len(end) :] = np.frombuffer(end, np.uint8)
    return row


def too_short(content: bytes) -> bool:
    """Whether there is so little in the file that magika does not ask its model."""
    return len(content) < _LEAST_BYTES or len(content[:_BLOCK].lstrip()) < _LEAST_BYTES
