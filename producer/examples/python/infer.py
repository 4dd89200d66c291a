# ruff: noqa: INP001, T201 - a script, not a package, and it talks to a person
"""Asks a model for one answer. Run it as: python infer.py MODEL [INPUT_NAME]."""

import asyncio
import sys

import numpy as np

from inferq import Client, InferqError


async def main(model: str, name: str = "x") -> None:
    """Send one row of four numbers and print what comes back."""
    async with Client() as client:
        answer = await client.infer(model, {name: np.array([[5.1, 3.5, 1.4, 0.2]], np.float32)}, deadline_s=10)
        print(answer.outputs, answer.result.served_by)


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3 or sys.argv[1].startswith("-"):
        sys.exit("usage: python infer.py MODEL [INPUT_NAME]")
    try:
        asyncio.run(main(*sys.argv[1:]))
    except InferqError as error:
        sys.exit(str(error))
