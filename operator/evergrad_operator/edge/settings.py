"""Reads the settings from command line and environment. Other modules do not read the environment.

Every option ``--some-name`` can also be set as ``EVERGRAD_SOME_NAME``. The command line takes precedence.
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.kinds import POD_GROUPS
from evergrad_operator.core.observe.profiles import parse_profiles

PREFIX: Final = "EVERGRAD_"
_OPTIONS: Final[tuple[tuple[str, Any, str], ...]] = (
    ("all-namespaces", False, "serve the whole cluster"),
    (
        "lease",
        True,
        "write only while holding a Lease, so that two operators never write at the same time",
    ),
    ("lease-namespace", "", "namespace of the Lease (default: the pod's namespace)"),
    ("lease-name", "evergrad-operator", "name of the Lease"),
    ("lease-seconds", 15.0, "seconds for which a renewal of the Lease is valid"),
    (
        "key-namespace",
        "",
        "namespace of the Secret with the installation's key (default: the Lease's namespace)",
    ),
    (
        "key-name",
        "evergrad-operator-key",
        "name of that Secret; the tokens of all runs are derived from its key",
    ),
    (
        "host",
        "",
        "address of /healthz, /readyz and /metrics (default: any, IPv6 and IPv4)",
    ),
    ("port", 8080, "port of /healthz, /readyz and /metrics"),
    (
        "page-port",
        0,
        "port of the page of all runs on 127.0.0.1, for kubectl port-forward; 0: no page",
    ),
    ("workers", 16, "number of runs that are reconciled at the same time"),
    ("in-flight", 32, "number of requests to the API server at the same time"),
    ("resync-seconds", 600.0, "seconds between two complete lists of all objects"),
    (
        "poll-seconds",
        5.0,
        "seconds between two polls of a run's coordinator; up to 20 with more than 200 runs",
    ),
    ("coordinator-port", 29401, "port of the status of coordinators"),
    (
        "webhook",
        False,
        "serve the validating webhook, which reports the problems of `evergrad validate`",
    ),
    ("webhook-port", 9443, "port of the validating webhook"),
    (
        "webhook-service",
        "evergrad-operator",
        "Service of the webhook, in the namespace of the Lease",
    ),
    (
        "webhook-secret",
        "evergrad-operator-webhook",
        "Secret with the webhook's certificate, in the namespace of the Lease",
    ),
    (
        "webhook-configuration",
        "evergrad-operator",
        "ValidatingWebhookConfiguration of the webhook",
    ),
    (
        "webhook-files",
        "",
        "folder with tls.crt and tls.key from another source; empty: the operator creates them",
    ),
    (
        "webhook-early",
        False,
        "a MutatingWebhookConfiguration with the same name exists, too",
    ),
    ("revision", "unknown", "commit of the image's sources, for the metric build_info"),
    ("log-level", "info", "debug, info, warning or error"),
    ("log-format", "text", "text or json"),
)
"""Name, default and help of each option of this process. The type of the default is the option's type."""
_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class OperatorSettings:
    """Settings of this process. ``namespaces``: namespaces to serve, or () for all. Times are in seconds."""

    namespaces: tuple[str, ...]
    config: Config
    identity: str
    lease: bool
    lease_namespace: str
    lease_name: str
    lease_seconds: float
    key_namespace: str
    key_name: str
    host: str
    port: int
    page_port: int
    workers: int
    in_flight: int
    resync_seconds: float
    poll_seconds: float
    coordinator_port: int
    webhook: bool
    webhook_port: int
    webhook_service: str
    webhook_secret: str
    webhook_configuration: str
    webhook_early: bool
    webhook_files: str
    revision: str
    log_level: str
    log_format: str

    @property
    def scopes(self) -> tuple[str | None, ...]:
        """Scopes to list: each namespace, or None for the whole cluster."""
        return self.namespaces or (None,)

    def covers(self, namespace: str) -> bool:
        """Return whether this operator serves the namespace."""
        return not self.namespaces or namespace in self.namespaces


def parse_settings(
    arguments: Sequence[str], environ: Mapping[str, str]
) -> OperatorSettings:
    """Return the settings. Raises SystemExit with a message if an argument is invalid."""
    parser = build_parser(environ)
    parsed = parser.parse_args(arguments)

    # Remove duplicates, because a namespace that is given twice would be listed twice.
    given = ",".join(parsed.namespace).split(",")
    namespaces = tuple(dict.fromkeys(name for name in given if name))
    if bool(namespaces) == parsed.all_namespaces:
        parser.error("give either --namespace, once or more, or --all-namespaces")
    lease_namespace = parsed.lease_namespace or environ.get("POD_NAMESPACE", "")
    if parsed.lease and not lease_namespace:
        parser.error(
            "--lease-namespace: say where the lease is, or set POD_NAMESPACE; --no-lease does without"
        )
    # Without a lease, for example in a trial outside a cluster, use a namespace that the operator serves.
    first_namespace = namespaces[0] if namespaces else "default"
    key_namespace = parsed.key_namespace or lease_namespace or first_namespace

    # Check only the syntax here. The content of a profile is checked with each run, whose status reports it.
    try:
        parse_profiles(parsed.profiles)
    except ValueError as error:
        parser.error(f"--profiles: not a JSON object of profiles by name: {error}")

    config: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        value = getattr(parsed, field.name)
        config[field.name] = tuple(value) if isinstance(value, list) else value
    gangs = ("none", *POD_GROUPS)
    if config["gang"] not in gangs:
        parser.error(f"--gang: {config['gang']!r} is not one of {', '.join(gangs)}")
    # Network policies select the operator by its namespace.
    if not config["operator_namespace"]:
        config["operator_namespace"] = environ.get("POD_NAMESPACE", "")

    # The identity must be unique among concurrent processes. A pod never runs two operator containers at the
    # same time, so the pod's name and uid suffice, and a restarted container immediately takes its own lease.
    identity = f"{socket.gethostname()}_{secrets.token_hex(4)}"
    if environ.get("POD_NAME"):
        identity = f"{environ['POD_NAME']}_{environ.get('POD_UID', '')}"

    derived = {"namespaces", "config", "identity", "lease_namespace", "key_namespace"}
    own = {field.name for field in dataclasses.fields(OperatorSettings)} - derived
    return OperatorSettings(
        namespaces=namespaces,
        config=Config(**config),
        identity=identity,
        lease_namespace=lease_namespace,
        key_namespace=key_namespace,
        **{name: getattr(parsed, name) for name in own},
    )


def build_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Build the parser with all options. Values of the environment are the defaults."""
    parser = argparse.ArgumentParser(
        prog="evergrad-operator", description="Runs TrainingRuns on Kubernetes."
    )
    named = environ.get(f"{PREFIX}NAMESPACE", "").split(",")
    given = [name for name in named if name]
    parser.add_argument_group("scope").add_argument(
        "--namespace",
        action="append",
        metavar="NAME",
        default=given,
        help="serve this namespace; repeatable",
    )
    for name, default, text in _OPTIONS:
        _add_option(parser, environ, name, default, text)

    # Each field of Config is an option. Its help is the docstring of the field, which has to be read from the
    # source, because Python does not keep it.
    [definition] = ast.parse(inspect.getsource(Config)).body
    descriptions = {}
    for statement, following in itertools.pairwise(getattr(definition, "body", ())):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                line = " ".join(text.split()).rstrip(".")
                # argparse formats help texts with %.
                descriptions[name] = line.replace("%", "%%")
    for field in dataclasses.fields(Config):
        value: Any = "" if field.default is dataclasses.MISSING else field.default
        _add_option(
            parser,
            environ,
            field.name.replace("_", "-"),
            value,
            f"{descriptions[field.name]} (default: {value!r})",
            is_required=value == "" and "image" in field.name,
        )
    return parser


def _add_option(
    parser: argparse.ArgumentParser,
    environ: Mapping[str, str],
    name: str,
    default: Any,
    text: str,
    *,
    is_required: bool = False,
) -> None:
    """Add one option with the type of its default. If the default is a tuple, the option is repeatable."""
    variable = PREFIX + name.upper().replace("-", "_")
    given = environ.get(variable)
    # A variable only replaces the default. An argument takes precedence over it, or adds to a list.
    if isinstance(default, bool):
        if given is not None and given.lower() not in _TRUE + _FALSE:
            parser.error(f"{variable}: {given!r} is neither true nor false")
        switch = default if given is None else given.lower() in _TRUE
        parser.add_argument(
            f"--{name}", action=argparse.BooleanOptionalAction, default=switch, help=text
        )
    elif isinstance(default, tuple):
        values = list(default)
        if given is not None:
            values = [part for part in given.split(",") if part]
        parser.add_argument(f"--{name}", action="append", default=values, help=text)
    else:
        kind = str if default is None else type(default)
        value = default if given is None else given
        needs = is_required and not value
        parser.add_argument(
            f"--{name}",
            type=kind,
            default=value,
            required=needs,
            help=text,
        )
