"""Settings, kopf's settings and the handlers, including known pitfalls of the framework."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import evergrad_operator
from evergrad_operator.core.objects.errors import SettingsError
from evergrad_operator.edge import handlers
from evergrad_operator.edge.handlers import build_registry, build_settings, check_kopf
from evergrad_operator.edge.settings import build_parser, parse_settings

IMAGES = ["--trainer-image", "t:1", "--operator-image", "o:1"]
SOURCES = sorted(Path(evergrad_operator.__file__).parent.rglob("*.py"))


def test_the_command_line_overrides_the_environment() -> None:
    environ = {
        "EVERGRAD_TRAINER_IMAGE": "a",
        "EVERGRAD_OPERATOR_IMAGE": "b",
        "EVERGRAD_WORKERS": "3",
        "EVERGRAD_LEASE": "false",
    }
    settings = parse_settings(["--all-namespaces", "--trainer-image", "c"], environ)
    assert (settings.config.trainer_image, settings.config.operator_image) == ("c", "b")
    assert (settings.workers, settings.lease, settings.namespaces) == (3, False, ())
    assert settings.scopes == (None,) and settings.covers("any")


def test_only_the_configured_namespaces_are_served() -> None:
    settings = parse_settings(
        [*IMAGES, "--no-lease", "--namespace", "a", "--namespace", "b", "--namespace", "a"],
        {},
    )
    assert settings.namespaces == settings.scopes == ("a", "b")
    assert settings.covers("a") and not settings.covers("c")


@pytest.mark.parametrize(
    ("arguments", "environ", "text"),
    [
        (["--no-lease"], {}, "--trainer-image"),
        ([*IMAGES, "--no-lease"], {}, "either --namespace"),
        (
            [*IMAGES, "--no-lease", "--all-namespaces", "--namespace", "a"],
            {},
            "either --namespace",
        ),
        ([*IMAGES, "--all-namespaces"], {}, "lease-namespace"),
        (
            [*IMAGES, "--all-namespaces", "--no-lease", "--gang", "volcano"],
            {},
            "'volcano' is not one of none, coscheduling, podGroup",
        ),
        (
            [*IMAGES, "--all-namespaces", "--no-lease"],
            {"EVERGRAD_NETWORK_POLICIES": "perhaps"},
            "neither true nor false",
        ),
    ],
)
def test_invalid_settings_are_reported(
    arguments: list[str],
    environ: dict[str, str],
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_settings(arguments, environ)
    assert text in capsys.readouterr().err


def test_containers_of_a_pod_share_one_identity_and_other_processes_have_their_own() -> (
    None
):
    environ = {"POD_NAME": "op", "POD_UID": "u", "POD_NAMESPACE": "system"}
    one, two = (parse_settings([*IMAGES, "--all-namespaces"], environ) for _ in range(2))
    assert one.identity == two.identity == "op_u"
    assert one.lease_namespace == one.config.operator_namespace == "system"
    one, two = (
        parse_settings([*IMAGES, "--all-namespaces", "--no-lease"], {}) for _ in range(2)
    )
    assert one.identity != two.identity


def test_no_limit_of_kopf_workers_limits_the_throughput() -> None:
    assert build_settings(()).queueing.worker_limit is None


def test_kopf_scans_nothing_so_that_a_namespaced_operator_starts_at_once() -> None:
    assert build_settings(()).scanning.disabled
    assert build_settings(("a",)).scanning.disabled


def test_only_pods_and_claims_of_evergrad_are_watched_and_lists_are_paged() -> None:
    watching = build_settings(()).watching
    assert {str(selector): value for selector, value in watching.label_selectors.items()}
    assert set(watching.label_selectors.values()) == {"evergrad.dev/run"}
    assert watching.chunk_size == 500
    assert watching.inactivity_timeout == 70


def test_kopf_posts_no_events_and_its_possible_writes_have_the_evergrad_prefix() -> None:
    settings = build_settings(())
    assert not settings.posting.enabled
    assert settings.persistence.finalizer.startswith("evergrad.dev/")
    assert (
        settings.persistence.diffbase_storage.prefix
        == settings.persistence.progress_storage.prefix
        == "evergrad.dev"
    )


def test_only_event_handlers_exist_so_that_kopf_adds_no_finalizer() -> None:
    async def nothing() -> None:
        return None

    registry = build_registry(lambda *_: None, None, on_start=nothing, on_stop=nothing)  # type: ignore[arg-type]
    watched = registry._watching.get_all_handlers()
    assert {handler.id for handler in watched} == {
        "trainingruns",
        "pods",
        "persistentvolumeclaims",
    }
    for others in (
        registry._changing,
        registry._spawning,
        registry._indexing,
        registry._webhooks,
    ):
        assert list(others.get_all_handlers()) == []


def test_handlers_return_nothing_because_kopf_would_write_it_into_the_status() -> None:
    tree = ast.parse(inspect.getsource(handlers))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)]
    assert {node.name for node in found} == {"take", "log_in", "start", "stop"}
    returns = {
        node.name: [
            one for one in ast.walk(node) if isinstance(one, ast.Return) and one.value
        ]
        for node in found
    }
    assert {name for name, values in returns.items() if values} == {"log_in"}


@pytest.mark.parametrize("version", ["1.45.2", "1.45.10", "1.46"])
def test_a_kopf_version_that_ends_the_process_if_a_watch_fails_is_accepted(
    version: str,
) -> None:
    check_kopf(version)


@pytest.mark.parametrize("version", ["1.45.1", "1.44.9", "2.0.0", "1.45"])
def test_any_other_kopf_version_is_refused_with_a_remedy(version: str) -> None:
    with pytest.raises(SettingsError, match=re.escape("kopf>=1.45.2,<2")):
        check_kopf(version)


def _is_async(module: str) -> bool:
    return module.startswith("kubernetes.aio.")


def calls(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def imported(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_no_coroutine_is_called_without_await() -> None:
    trees = {path.name: ast.parse(path.read_text()) for path in SOURCES}
    for name, tree in trees.items():
        assert calls(tree) & {"time.sleep", "requests.get", "subprocess.run"} == set(), name
        assert {
            one
            for one in imported(tree)
            if one.split(".")[0] in ("requests", "urllib3", "subprocess")
        } == set(), name
        assert {
            one
            for one in imported(tree)
            if one.startswith("kubernetes") and not one.startswith("kubernetes.aio")
        } == set(), name


def test_kopf_never_copies_labels_to_children() -> None:
    assert [path.name for path in SOURCES if "kopf.adopt" in path.read_text()] == []


def test_the_operator_folder_is_not_a_package() -> None:
    folder = Path(evergrad_operator.__file__).parents[1]
    assert folder.name == "operator"
    assert not (folder / "__init__.py").exists()


def test_only_one_module_requests_the_api_server_and_one_the_coordinators() -> None:
    using: dict[str, set[str]] = {}
    for path in SOURCES:
        for name in imported(ast.parse(path.read_text())):
            using.setdefault(name.split(".")[0], set()).add(path.name)
    assert using["kopf"] == {"handlers.py", "service.py"}
    assert using["kubernetes"] == {"kube.py", "transport.py", "connection.py"}
    servers = {"endpoint.py", "fleet_page.py", "server.py", "request_limits.py"}
    # The log recognizes an error of a server's client by its class.
    assert using["aiohttp"] == {"transport.py", "logs.py", *servers}
    assert using["cryptography"] == {"certificates.py"}


def test_kopf_passes_objects_to_the_cache_and_does_nothing_else() -> None:
    import asyncio

    seen: list[Any] = []

    async def nothing() -> None:
        return None

    registry = build_registry(
        lambda *news: seen.append(news), None, on_start=nothing, on_stop=nothing
    )  # type: ignore[arg-type]
    (handler,) = [one for one in registry._watching.get_all_handlers() if one.id == "pods"]
    raw = {"metadata": {"name": "p"}}
    for kind in (None, "ADDED", "MODIFIED", "DELETED"):
        assert asyncio.run(handler.fn(event={"type": kind, "object": raw})) is None  # type: ignore[arg-type]
    assert seen == [("pods", raw, kind) for kind in (None, "ADDED", "MODIFIED", "DELETED")]


def test_every_command_line_option_has_its_own_help_text() -> None:
    actions = [action for action in build_parser({})._actions if action.option_strings]
    texts = [str(action.help) for action in actions]
    assert all(len(text) >= len("its port") for text in texts)
    assert sorted({text for text in texts if texts.count(text) > 1}) == []
