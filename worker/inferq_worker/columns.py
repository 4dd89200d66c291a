"""Tables for people at a terminal: columns under their headings, figures to the right."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet


def aligned(
    columns: Sequence[str],
    lines: Sequence[Mapping[str, str]],
    *,
    left: AbstractSet[str] = frozenset(),
    indent: str = "",
) -> str:
    """Lay lines out under their headings.

    Args:
        columns: headings, which are the keys of `lines`.
        lines: texts by heading.
        left: the columns that hold words, and so start at the left.
        indent: before every line.
    """
    widths = {column: max([len(column), *(len(line[column]) for line in lines)]) for column in columns}
    rows = [{column: column for column in columns}, *lines]
    return "\n".join(
        indent + "  ".join(f"{row[one]:{'<' if one in left else '>'}{widths[one]}}" for one in columns).rstrip()
        for row in rows
    )
