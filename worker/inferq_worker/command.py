"""`inferq worker`: reads the configuration, then hands over to the worker program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferq.commands import Subparsers, add_command
from inferq.configuration import load_settings

if TYPE_CHECKING:
    import argparse


def register(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = add_command(
        subparsers,
        "worker",
        summary="serve models: take jobs from the queues, batch them, answer",
        description="""
            Serve ONNX models from their queues until SIGTERM or Ctrl-C: the first drains, the second forces.

            A file given with --model is served under its own name, and its queues are created through the broker's
            management API where that is allowed; models in --models DIR need `inferq topology add-model NAME` first.
            """,
        examples="""
            inferq worker --model resnet50.onnx
            inferq worker --model faces=models/retina.onnx --model texts=bert.onnx --set batching.max_rows=64
            inferq worker --models ./models --role cpu
            INFERQ_BROKER__URL=amqps://user:password@broker/prod inferq worker --models /models --provider cuda
            """,
    )
    parser.add_argument(
        "--model", metavar="[NAME=]FILE", action="append", default=[], help="serve this .onnx file; may be repeated"
    )
    parser.add_argument("--models", metavar="DIR", help="serve DIR/<name>/<version>/model.onnx, the newest version")
    parser.add_argument("--role", choices=("gpu", "cpu"), help="gpu: job lanes (default); cpu: the fallback queues")
    parser.add_argument("--provider", choices=("cuda", "tensorrt", "cpu"), help="execution provider (default cuda)")
    parser.add_argument("--require-provider", action="store_true", help="refuse to start when it is not what runs")
    parser.add_argument("--admin-port", type=int, metavar="PORT", help="port of /metrics and probes (0 = any free one)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run a worker with the command line on top of all other sources."""
    from inferq_worker.app import serve  # noqa: PLC0415 - --help must not import the worker
    from inferq_worker.settings import WorkerSettings  # noqa: PLC0415 - same

    return serve(load_settings(WorkerSettings, config_file=args.config, overrides=_overrides(args)))


def _overrides(args: argparse.Namespace) -> list[str]:
    chosen = {
        "models.dir": args.models,
        "role": args.role,
        "runtime.provider": args.provider,
        "runtime.provider_policy": "require" if args.require_provider else None,
        "admin.port": args.admin_port,
    }
    files = [f"models.files={_list(args.model)}"] if args.model else []
    return [f"{key}={value}" for key, value in chosen.items() if value is not None] + files + list(args.set)


def _list(values: list[str]) -> str:
    import json  # noqa: PLC0415 - only here

    return json.dumps(values)
