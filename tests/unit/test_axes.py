"""Dynamic axes get the sizes that a person names."""

import pytest

from inferq.commands import CommandError
from inferq_worker.inspection.axes import sized
from inferq_worker.runtime.interface import TensorSpec
from inferq_worker.runtime.onnxfile import DeclaredTensor

SPECS = (TensorSpec("ids", "int64", (None, None)), TensorSpec("image", "float32", (None, 3, None, None)))
DECLARED = (
    DeclaredTensor("ids", "int64", ("batch", "sequence")),
    DeclaredTensor("image", "float32", ("batch", 3, None, None)),
)


def shapes(**sizes: int) -> list[tuple[int | None, ...]]:
    return [spec.shape for spec in sized(SPECS, DECLARED, {name.replace("_", ":"): n for name, n in sizes.items()})]


def test_an_axis_is_called_by_its_name() -> None:
    assert shapes(sequence=128) == [(None, 128), (None, 3, None, None)]


def test_an_axis_without_a_name_is_called_by_its_number() -> None:
    assert shapes(image_2=224, image_3=320, ids_1=7) == [(None, 7), (None, 3, 224, 320)]


def test_without_sizes_nothing_changes() -> None:
    assert sized(SPECS, DECLARED, {}) == SPECS


@pytest.mark.parametrize("name", ["batch", "ids_0", "image_1", "height"])
def test_axis_0_fixed_axes_and_unknown_ones_are_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(CommandError, match="there are: ids:1, image:2, image:3, sequence"):
        shapes(**{name: 5})
