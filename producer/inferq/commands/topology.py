"""`inferq topology`: create, check, export and change what is on the broker. Works on the management API.

The rules are in `inferq.provision` and `inferq_schemas`; here is what a person types and reads.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferq.commands import CommandError, add_command, settings_of, speak_in_lines
from inferq.counts import count_queues
from inferq.management import Management, vhost_of
from inferq.names import lane_problem, model_problem
from inferq.passwords import passwords_of, rabbitmq_hash, redis_hash
from inferq.provision import bring, delete_model, ensure_model, models_of, only_models, queues_of, unbind_model
from inferq.redis_access import REDIS_USERS, acl_lines
from inferq.settings import ClientSettings
from inferq_schemas import ContractError, ModelTopology, Topology, diff, hardened_definitions, roles

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from inferq.commands import Subparsers

__all__ = ["ensure_model", "register"]

_Models = dict[str, ModelTopology]
_DESCRIPTION = """\
Creates, checks, exports and changes the queues, exchanges, bindings and policies of inferq on the broker, through its
management API (broker.management_url, or port 15672 on the broker's host, with amqps:// port 15671 over TLS). Workers
and clients never declare job queues: this command does, once, with an account that may.

Models come from [topology.models.NAME] in inferq.toml and from --model."""
_EXAMPLES = """\
inferq topology apply --model resnet50
inferq topology check
inferq topology add-model bert --lanes interactive,bulk,nightly
inferq topology remove-model bert
inferq topology export --model resnet50 > definitions.json
inferq topology export --hardened --passwords secrets/ > definitions.json
inferq topology export --redis-acl --passwords secrets/ > users.acl"""


def register(subparsers: Subparsers) -> None:
    """Add `inferq topology` and its actions."""
    parser = add_command(
        subparsers,
        "topology",
        summary="create, check, export and change the queues on the broker",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    apply = _action(
        actions,
        "apply",
        _apply,
        "create what is missing and set the policies",
        "Creates the shared objects and the queues of all models: those of inferq.toml, of --model, and those that the "
        "broker already has, which are kept. Deletes no queue. Doing it twice changes nothing. Exit status 1 if "
        "something is left that it cannot mend.",
    )
    check = _action(
        actions,
        "check",
        _check,
        "compare the broker with what it should be",
        "Prints every difference with its mend. With --model it looks only at what belongs to these models and to all; "
        "without, at all models of inferq.toml, and what belongs to others is a difference; with none there either, at "
        "the models whose queues the broker has. Exit status 0 if there is no difference, else 1.",
    )
    export = _action(
        actions,
        "export",
        _export,
        "print a definitions file",
        "Prints the RabbitMQ definitions of the models of inferq.toml and of --model, for "
        "`rabbitmqctl import_definitions`. Needs no broker, unless --live asks for what the broker holds now.",
    )
    what = export.add_mutually_exclusive_group()
    what.add_argument("--live", action="store_true", help="print what the broker holds now instead")
    what.add_argument(
        "--hardened", action="store_true", help="with a user for each role, and what it may do with these models"
    )
    what.add_argument("--redis-acl", action="store_true", help="print the roles' users as an ACL file of Redis instead")
    export.add_argument(
        "--passwords",
        type=Path,
        metavar="FOLDER",
        help="their passwords, one file a user; missing ones are made. Without it nobody can log in at first",
    )
    for taking_models in (apply, check, export):
        taking_models.add_argument(
            "--model", metavar="NAME", action="append", default=[], help="a model with the default lanes; repeatable"
        )
    _register_model_actions(actions)


def _register_model_actions(actions: Subparsers) -> None:
    add = _action(
        actions,
        "add-model",
        _add_model,
        "create the queues of one model",
        "Creates the queues, bindings and policy of a model, and the shared objects if they are missing. The lanes are "
        "--lanes, or those of inferq.toml, or interactive and bulk. Refuses to change the lanes or the fallback of a "
        "model that the broker has, unless --force; no queue is deleted even then.",
    )
    add.add_argument("name", metavar="NAME", help="name of the model, as in the jobs")
    add.add_argument("--lanes", metavar="A,B", help="its lanes, with commas between")
    add.add_argument("--no-fallback", action="store_true", help="no CPU workers serve it: late jobs are dead-lettered")
    add.add_argument("--force", action="store_true", help="change the lanes or the fallback of a model that is there")
    remove = _action(
        actions,
        "remove-model",
        _remove_model,
        "delete the queues of one model",
        "Deletes the queues, bindings and policy of a model. Refuses while a queue holds messages or has consumers, "
        "unless --force says that they may be lost.",
    )
    remove.add_argument("name", metavar="NAME", help="name of the model")
    remove.add_argument("--force", action="store_true", help="delete it with all jobs that are in its queues")


def _action(
    actions: Subparsers, name: str, func: Callable[[argparse.Namespace], int], summary: str, description: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=summary, description=description, allow_abbrev=False)
    parser.set_defaults(func=func)
    return parser


def _apply(args: argparse.Namespace) -> int:
    settings = settings_of(args, ClientSettings)
    management = Management.of(settings.broker)
    # A model that the broker has keeps its lanes, unless the file says otherwise: --model alone names only defaults.
    present = models_of(management.definitions())
    expected = Topology((_asked(args, settings) | present | _configured(settings)).values())
    _report(bring(management, expected), nothing="nothing to do: the broker has it all")
    return _print_differences(expected, management.definitions(), named=args.model)


def _check(args: argparse.Namespace) -> int:
    settings = settings_of(args, ClientSettings)
    actual = Management.of(settings.broker).definitions()
    models = _asked(args, settings) or models_of(actual)
    if args.model:
        models = {name: models[name] for name in args.model}
        actual = only_models(actual, models)
    status = _print_differences(Topology(models.values()), actual, named=args.model)
    if status == 0:
        print(f"the broker is as it should be for {_listed(models)}")
    return status


def _export(args: argparse.Namespace) -> int:
    settings = settings_of(args, ClientSettings)
    if args.passwords is not None and not (args.hardened or args.redis_acl):
        raise CommandError("--passwords is for --hardened and --redis-acl: say which")
    if args.redis_acl:
        hashes = _hashes(args.passwords, REDIS_USERS, redis_hash)
        print("\n".join(acl_lines(settings.redis.prefix, password_hashes=hashes)))
        return 0
    topology, vhost = Topology(_asked(args, settings).values()), vhost_of(settings.broker.url.get_secret_value())
    if args.live:
        content = Management.of(settings.broker).definitions()
    elif args.hardened:
        hashes = _hashes(args.passwords, [role.user for role in roles()], rabbitmq_hash)
        content = hardened_definitions(topology, vhost, password_hashes=hashes)
    else:
        content = topology.definitions(vhost)
    print(json.dumps(content, indent=2))
    return 0


def _hashes(folder: Path | None, users: Iterable[str], hashed: Callable[[str], str]) -> dict[str, str]:
    if folder is None:
        return {}
    try:
        return {user: hashed(password) for user, password in passwords_of(folder, users).items()}
    except OSError as error:
        raise CommandError(f"--passwords {folder}: {error}") from None


def _add_model(args: argparse.Namespace) -> int:
    settings = settings_of(args, ClientSettings)
    configured = _configured(settings).get(args.name, _model(args.name))
    lanes = configured.lanes if args.lanes is None else tuple(lane.strip() for lane in args.lanes.split(","))
    model = _model(args.name, lanes, fallback=configured.fallback and not args.no_fallback)
    management = Management.of(settings.broker)
    present = models_of(management.definitions()).get(args.name)
    if present is not None and not args.force and (changes := _changes(present, model)):
        raise CommandError(
            f"the broker has model {args.name}, and this would change it: {'; '.join(changes)}. Nothing was done. Name "
            "its lanes as they are (--lanes, --no-fallback), or say --force"
        )
    _report(ensure_model(management, model), nothing=f"nothing to do: the broker has {args.name}")
    actual = management.definitions()
    return _print_differences(Topology((models_of(actual) | {model.model: model}).values()), actual)


def _changes(present: ModelTopology, wanted: ModelTopology) -> list[str]:
    """What would change, in words; the order of lanes is no difference."""
    more = [lane for lane in wanted.lanes if lane not in present.lanes]
    fewer = [lane for lane in present.lanes if lane not in wanted.lanes]
    changes = [f"create the lane{'s' if len(more) > 1 else ''} {', '.join(more)}"] if more else []
    if fewer:
        changes.append(f"leave the lane{'s' if len(fewer) > 1 else ''} {', '.join(fewer)} over, which it has now")
    if present.fallback != wanted.fallback:
        changes.append(
            "give it a CPU fallback, which it has not now"
            if wanted.fallback
            else "send its late jobs to inferq.dead, and leave its fallback queue over"
        )
    return changes


def _remove_model(args: argparse.Namespace) -> int:
    settings = settings_of(args, ClientSettings)
    management = Management.of(settings.broker)
    actual = management.definitions()
    queues = queues_of(actual, args.name)
    if not queues:
        known = ", ".join(models_of(actual)) or "none"
        raise CommandError(f"the broker has no queues of a model {args.name!r}; it has: {known}")
    if not args.force:
        _refuse_if_in_use(settings, queues, args.name)
    bindings = unbind_model(management, actual, args.name)
    try:
        if not args.force:
            # Again, now that nothing new can arrive: a job may have come between the first look and the unbinding.
            _refuse_if_in_use(settings, queues, args.name)
    except BaseException:
        for source, queue, key in bindings:
            management.put_binding(source, queue, key)
        raise
    print("\n".join(delete_model(management, actual, args.name)))
    return 0


def _refuse_if_in_use(settings: ClientSettings, queues: Sequence[str], model: str) -> None:
    speak_in_lines()
    counts = asyncio.run(count_queues(settings.broker, queues))
    used = [
        f"{queue} holds {count.ready} messages and has {count.consumers} consumers"
        for queue, count in counts.items()
        if count.ready or count.consumers
    ]
    if used:
        raise CommandError(
            f"model {model} is in use, nothing was deleted: {'; '.join(used)}. Stop its clients, let its workers empty "
            "the queues and stop them too; or use --force, which loses these jobs"
        )


def _model(name: str, lanes: tuple[str, ...] | None = None, *, fallback: bool = True) -> ModelTopology:
    problems = [model_problem(name), *map(lane_problem, lanes or ())]
    if problem := next(filter(None, problems), None):
        raise CommandError(problem)
    try:
        return ModelTopology(name, fallback=fallback) if lanes is None else ModelTopology(name, lanes, fallback)
    except ContractError as error:
        raise CommandError(error.message) from None


def _configured(settings: ClientSettings) -> _Models:
    return {
        name: _model(name, entry.lanes, fallback=entry.fallback) for name, entry in settings.topology.models.items()
    }


def _asked(args: argparse.Namespace, settings: ClientSettings) -> _Models:
    """The models of inferq.toml and of --model; a name in both has the lanes of the file."""
    return {name: _model(name) for name in args.model} | _configured(settings)


def _report(done: Sequence[str], *, nothing: str) -> None:
    for line in done or [nothing]:
        print(line)


def _print_differences(expected: Topology, actual: Mapping[str, Any], *, named: Sequence[str] = ()) -> int:
    differences = diff(expected, actual)
    # A model that only the command line names must be named in the mend as well.
    mend = " ".join(["`inferq topology apply", *(f"--model {name}" for name in named)]) + "`"
    for difference in differences:
        problem = difference.problem.replace("`inferq topology apply`", mend)
        print(f"{difference.kind} {difference.name}: {problem}")
    if differences:
        print(f"{len(differences)} difference{'s' if len(differences) > 1 else ''}")
    return 1 if differences else 0


def _listed(models: _Models) -> str:
    return ", ".join(sorted(models)) or "no model (only the shared objects were compared)"
