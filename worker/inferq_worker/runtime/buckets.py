"""The sizes that runs are padded to, so that a device sees a few shapes again and again instead of a new one each time.

A new shape costs a GPU the choice of an algorithm for every convolution, and a captured graph fits one size only. On a
CPU a shape costs nothing and a padded row as much as a real one.
"""

from collections.abc import Sequence
from typing import Literal


def buckets(wish: Literal["auto", "off"] | Sequence[int], max_rows: int, *, on_cpu: bool) -> tuple[int, ...]:
    """The sizes of runs in rows, ascending.

    Args:
        wish: as in the settings; sizes above `max_rows` are left out.
        max_rows: most rows of one run: always the last size.
        on_cpu: whether the CPU runs the model.

    Returns:
        Nothing if runs are not padded.
    """
    if wish == "off" or (wish == "auto" and on_cpu):
        return ()
    sizes = [1 << power for power in range(max_rows.bit_length())] if wish == "auto" else wish
    return tuple(sorted({max_rows, *(int(size) for size in sizes if int(size) < max_rows)}))
