"""The validating webhook: its responses, its server, and its certificate."""

import asyncio
import base64
import json
import ssl
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from admission_samples import SAMPLES, Sample
from cryptography import x509
from fake_kubernetes.recipe import TRAINING
from webhook_samples import NAMES, SETTINGS, Store, make_object, make_webhook, post

from evergrad_manifest.validation import problems_of
from evergrad_operator.core.admission import (
    deny_size,
    find_problems,
    has_too_many_values,
    review,
)
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.errors import ApiError
from evergrad_operator.core.objects.installation import Installation
from evergrad_operator.core.observe.profiles import NamespaceProfile, resolve
from evergrad_operator.core.observe.spec import SpecCache
from evergrad_operator.edge.cache.namespace_profiles import parse_profile
from evergrad_operator.edge.webhook import certificates
from evergrad_operator.edge.webhook.server import Webhook

NOW = datetime(2030, 1, 1, tzinfo=UTC)


WRONG = {
    "nodes": {"min": 3, "max": 2},
    "training": {**TRAINING, "schedule": {"type": "wsd", "warmup": "150%"}},
}


def ask(new: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> dict[str, Any]:
    request = {
        "uid": "r-1",
        "name": "docs-lm",
        "object": new,
        "oldObject": old,
        "dryRun": True,
    }
    answer = review(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    )
    response: dict[str, Any] = answer["response"]
    assert response["uid"] == "r-1"
    return response


# ---- the response
# --------------------------------------------------------------------------------------------


def test_a_valid_run_is_allowed() -> None:
    assert ask(make_object()) == {"uid": "r-1", "allowed": True}


def test_a_denial_lists_every_problem_that_validate_finds_with_path_reason_and_remedy() -> (
    None
):
    wrong = make_object(**WRONG)
    response, expected = ask(wrong), problems_of(wrong)
    assert len(expected) == 2
    status = response["status"]
    assert (response["allowed"], status["code"], status["reason"]) == (
        False,
        422,
        "Invalid",
    )
    told = [
        f"{cause['field']}: {cause['message']}" for cause in status["details"]["causes"]
    ]
    assert told == [str(problem) for problem in expected]
    assert status["message"] == " ".join(told)
    assert (status["details"]["kind"], status["details"]["name"]) == (
        "TrainingRun",
        "docs-lm",
    )


def test_a_service_account_that_the_installation_does_not_allow_is_denied() -> None:
    template = {"serviceAccountName": "fetcher"}
    (cause,) = ask(make_object(template=template))["status"]["details"]["causes"]
    assert cause["field"] == "spec.template.serviceAccountName"
    assert cause["message"].startswith("'fetcher' is not a service account that this")
    allowed = Installation(service_accounts=("fetcher",))
    assert find_problems(make_object(template=template), None, allowed) == ()
    # A shortened list does not prevent other changes; the operator creates no pod.
    old = make_object(template=template, status={"recipeHash": "a" * 64})
    assert find_problems(make_object(template=template, restartNonce="x"), old) == ()
    other = make_object(template={"serviceAccountName": "admin"})
    assert [one.path for one in find_problems(other, old)] == [cause["field"]]


def test_a_name_that_the_api_server_generates_is_not_a_problem() -> None:
    raw = make_object(metadata={"generateName": "docs-"})
    del raw["metadata"]["name"]
    assert find_problems(raw, None) == ()


def test_a_recipe_cannot_change_after_the_run_has_started() -> None:
    old = make_object(status={"phase": "Running", "recipeHash": "a" * 64})
    new = make_object(
        training={**TRAINING, "batching": {"globalBatchSize": 2048, "microBatchSize": 1}}
    )
    assert [problem.path for problem in find_problems(new, old)] == [
        "spec.training.batching.globalBatchSize"
    ]
    longer = make_object(training={**TRAINING, "horizon": {"steps": 2000}})
    assert find_problems(longer, old) == ()


def test_a_refused_run_may_be_corrected_and_gets_all_remaining_problems() -> None:
    old = make_object(status={"phase": "Waiting", "reason": "InvalidSpec"}, **WRONG)
    assert find_problems(make_object(), old) == ()
    half = make_object(nodes=WRONG["nodes"])
    assert find_problems(half, old) == problems_of(half) != ()


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"finalizers": ["x/y"]}},
        {"metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}}},
        {"suspend": True},
    ],
    ids=json.dumps,
)
def test_existing_problems_do_not_prevent_suspending_or_labelling_a_run(
    change: dict[str, Any],
) -> None:
    old = make_object(status={"phase": "Running", "recipeHash": "a" * 64}, **WRONG)
    assert find_problems(make_object(**{**WRONG, **change}), old) == ()


def test_existing_problems_do_not_prevent_another_change_but_new_problems_do() -> None:
    old = make_object(status={"phase": "Running", "recipeHash": "a" * 64}, **WRONG)
    assert find_problems(make_object(**WRONG, restartNonce="again"), old) == ()
    worse = make_object(**WRONG, ttlSecondsAfterFinished=-1)
    assert [problem.path for problem in find_problems(worse, old)] == [
        "spec.ttlSecondsAfterFinished"
    ]


def test_a_run_that_is_being_deleted_may_always_drop_its_finalizers() -> None:
    gone = {"deletionTimestamp": "2030-01-01T00:00:00Z"}
    assert find_problems(make_object(metadata=gone, **WRONG), make_object(**WRONG)) == ()


# ---- one check ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_webhook_and_operator_find_the_same_problems(sample: Sample) -> None:
    config = replace(Config(trainer_image="t", operator_image="o"), **sample.config)
    raw = make_object(**sample.spec)
    own = None if sample.own is None else parse_profile(sample.own)
    response = review({"request": {"uid": "r", "object": raw}}, config.installation, own)[
        "response"
    ]
    profile = resolve(raw, config.profiles, own, config.installation)
    run = SpecCache(config.installation).parse(raw, profile)
    obstacles = [str(one) for one in run.find_obstacles(has_begun=False)]
    assert response["allowed"] is (sample.refused == ""), response
    if sample.refused:
        causes = response["status"]["details"]["causes"]
        told = [f"{one['field']}: {one['message']}" for one in causes]
        assert told == obstacles
        assert any(one.startswith(sample.refused) for one in told), told
    elif sample.held:
        # An invalid profile holds the run, but is not a mistake in its file.
        (warning,) = response["warnings"]
        assert warning.startswith(sample.held) and obstacles[0].startswith(warning[:200])
    else:
        assert obstacles == [] and "warnings" not in response


def big(count: int, **more: Any) -> dict[str, Any]:
    raw = make_object()
    config = {"model_type": "llama", "factors": [1.0] * count}
    raw["spec"]["training"]["model"] = {"config": config}
    raw["spec"] |= more
    return raw


@pytest.mark.parametrize("count", [25_000, 50_000])
def test_a_run_of_any_size_can_be_suspended_and_labelled(count: int) -> None:
    old = big(count)
    marked = {**big(count), "metadata": {**old["metadata"], "labels": {"a": "b"}}}
    for new in (big(count, suspend=True), marked):
        assert answer_of(new, old)["allowed"] is True
    assert answer_of(big(count), None)["allowed"] is (count < 40_000)
    changed = answer_of(big(count, ttlSecondsAfterFinished=5), old)
    assert changed["allowed"] is (count < 40_000)


def answer_of(new: Any, old: Any) -> dict[str, Any]:
    """Check like the server does: the size first."""
    request = {"uid": "r", "object": new, "oldObject": old}
    raw = {"request": request}
    answer = deny_size(raw) if has_too_many_values(request) else review(raw)
    found: dict[str, Any] = answer["response"]
    return found


def test_an_update_of_a_started_run_is_checked_with_the_profile_it_started_with() -> None:
    note = '{"defaults":{"template":{"volumes":[{"emptyDir":{},"name":"code"}]}},"from":["default"]}'
    status = {"phase": "Running", "recipeHash": "a" * 64, "memory": {"profile": note}}
    template = {"volumeMounts": [{"name": "code", "mountPath": "/code"}]}
    old = make_object(template=template, status=status)
    new = make_object(template=template, ttlSecondsAfterFinished=5, status=status)
    assert find_problems(new, old) == ()
    other = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    assert [one.path for one in find_problems(make_object(template=other), old)] == [
        "spec.template.volumeMounts[0].name"
    ]


def test_the_webhook_reads_the_namespace_profile_and_answers_without_it_too() -> None:
    asked: list[str] = []

    async def fetch(namespace: str) -> NamespaceProfile | None:
        asked.append(namespace)
        if namespace == "broken":
            raise ApiError(503, "ServiceUnavailable", "not now")
        volumes = "[{name: code, emptyDir: {}}]"
        return parse_profile(f"defaults: {{template: {{volumes: {volumes}}}}}")

    async def run() -> None:
        store = Store()
        webhook = Webhook(SETTINGS, store, leads=lambda: True, fetch_profile=fetch)
        await webhook.look()
        template = {"volumeMounts": [{"name": "code", "mountPath": "/code"}]}
        for namespace, allowed in (("team", True), ("broken", False)):
            request = {
                "uid": "r",
                "namespace": namespace,
                "object": make_object(template=template),
            }
            body = json.dumps({"request": request}).encode()
            _, answer = await post(webhook, store.trusted, body)
            assert answer["response"]["allowed"] is allowed, namespace
        await webhook.close()

    asyncio.run(run())
    assert asked == ["team", "broken"]


# ---- the certificate ---------------------------------------------------------------------------------------


def read(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def test_a_certificate_has_the_service_names_and_is_signed_by_the_trusted_authority() -> (
    None
):
    bundle = certificates.renew(None, NAMES, now=NOW)
    assert bundle is not None
    certificate, authority = read(bundle.certificate), read(bundle.authority)
    certificate.verify_directly_issued_by(authority)
    found = certificate.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    ).value
    assert tuple(found.get_values_for_type(x509.DNSName)) == NAMES
    assert certificates.read_bundle(certificates.write_bundle(bundle)) == bundle
    assert certificates.renew(bundle, NAMES, now=NOW) is None


def test_a_certificate_is_renewed_in_time_by_the_same_authority() -> None:
    first = certificates.renew(None, NAMES, now=NOW)
    assert first is not None
    assert certificates.renew(first, NAMES, now=NOW + timedelta(days=200)) is None
    second = certificates.renew(first, NAMES, now=NOW + timedelta(days=250))
    assert second is not None and second.authority == first.authority
    assert (
        read(second.certificate).not_valid_after_utc
        > read(first.certificate).not_valid_after_utc
    )


def test_a_new_authority_is_listed_before_the_old_one_that_other_replicas_still_serve() -> (
    None
):
    first = certificates.renew(None, NAMES, now=NOW)
    assert first is not None
    late = NOW + timedelta(days=9 * 365)
    second = certificates.renew(first, NAMES, now=late)
    assert second is not None
    newest, old = x509.load_pem_x509_certificates(second.authority)
    assert old == read(first.authority)
    read(second.certificate).verify_directly_issued_by(newest)
    assert certificates.renew(second, NAMES, now=late) is None


def test_a_certificate_from_a_clock_that_was_ahead_is_replaced_with_its_authority() -> None:
    ahead = certificates.renew(None, NAMES, now=NOW + timedelta(days=400))
    assert ahead is not None
    mended = certificates.renew(ahead, NAMES, now=NOW)
    assert mended is not None
    for pem in (mended.authority, mended.certificate):
        assert read(pem).not_valid_before_utc <= NOW
    assert certificates.renew(mended, NAMES, now=NOW) is None


def test_a_serving_certificate_that_is_not_valid_yet_is_replaced_by_the_same_authority() -> (
    None
):
    first = certificates.renew(None, NAMES, now=NOW)
    assert first is not None
    ahead = certificates.renew(first, NAMES, now=NOW + timedelta(days=300))
    assert ahead is not None and ahead.authority == first.authority
    mended = certificates.renew(ahead, NAMES, now=NOW)
    assert mended is not None and mended.authority == first.authority
    assert read(mended.certificate).not_valid_before_utc <= NOW


@pytest.mark.parametrize(
    "broken",
    ["names", "key", "certificate", "serving key", "unreadable serving key", "authority"],
)
def test_an_unusable_certificate_bundle_is_replaced(broken: str) -> None:
    bundle, other = (certificates.renew(None, NAMES, now=NOW) for _ in range(2))
    assert bundle is not None and other is not None
    data = certificates.write_bundle(bundle)
    names = NAMES
    if broken == "names":
        names = ("renamed.evergrad.svc",)
    elif broken == "key":
        data["ca.key"] = base64.b64encode(b"nonsense").decode()
    elif broken == "certificate":
        data["tls.crt"] = certificates.write_bundle(other)["tls.crt"]
    elif broken == "serving key":
        data["tls.key"] = certificates.write_bundle(other)["tls.key"]
    elif broken == "unreadable serving key":
        data["tls.key"] = base64.b64encode(b"nonsense").decode()
    else:
        del data["ca.crt"]
    assert certificates.renew(certificates.read_bundle(data), names, now=NOW) is not None


def test_an_authority_with_the_key_of_another_is_replaced_once() -> None:
    bundle, other = (certificates.renew(None, NAMES, now=NOW) for _ in range(2))
    assert bundle is not None and other is not None
    mended = certificates.renew(
        replace(bundle, authority_key=other.authority_key), NAMES, now=NOW
    )
    assert mended is not None
    assert certificates.renew(mended, NAMES, now=NOW) is None


# ---- the server --------------------------------------------------------------------------------------------


def test_the_lease_holder_creates_the_certificate_and_writes_the_ca_bundle_once() -> None:
    async def run() -> None:
        store = Store()
        webhook = make_webhook(store)
        answers: list[bool] = []
        webhook.on_review = answers.append
        for _ in range(3):
            await webhook.look()
        assert store.writes == ["create", "apply"]
        request = {"uid": "r", "object": make_object(**WRONG)}
        status, answer = await post(
            webhook, store.trusted, json.dumps({"request": request}).encode()
        )
        assert (status, answer["response"]["allowed"], answers) == (200, False, [False])
        for nonsense in (b"", b"[]", b'{"request": 3}'):
            assert (await post(webhook, store.trusted, nonsense))[0] == 400
        await webhook.close()

    asyncio.run(run())


def test_both_webhook_configurations_trust_the_same_authority_if_the_early_one_is_enabled() -> (
    None
):
    async def run() -> None:
        store = Store()
        webhook = Webhook(replace(SETTINGS, is_early=True), store, leads=lambda: True)
        for _ in range(2):
            await webhook.look()
        assert store.writes == ["create", "apply", "apply"]
        assert store.early == store.configuration
        await webhook.close()

    asyncio.run(run())


def test_a_standby_serves_the_certificate_of_the_lease_holder_and_writes_nothing() -> None:
    async def run() -> None:
        store = Store()
        standby = make_webhook(store, leads=False)
        await standby.look()
        assert (standby.port, store.writes) == (0, [])
        leader = make_webhook(store)
        await leader.look()
        await standby.look()
        request = json.dumps({"request": {"uid": "r", "object": make_object()}}).encode()
        assert (await post(standby, store.trusted, request))[1]["response"][
            "allowed"
        ] is True
        assert store.writes == ["create", "apply"]
        # A renewed certificate is served without a restart.
        del store.secrets["certificate"]["data"]["tls.crt"]
        await leader.look()
        await standby.look()
        assert (await post(standby, store.trusted, request))[0] == 200
        assert store.writes == ["create", "apply", "replace", "apply"]
        await leader.close()
        await standby.close()

    asyncio.run(run())


def test_a_new_process_serves_the_previous_certificate_although_nothing_can_be_written() -> (
    None
):
    async def run() -> None:
        store = Store()
        before = make_webhook(store)
        await before.look()
        await before.close()
        store.early = None
        webhook = Webhook(replace(SETTINGS, is_early=True), store, leads=lambda: True)
        with pytest.raises(OSError, match="there is no MutatingWebhookConfiguration"):
            await webhook.look()
        request = json.dumps({"request": {"uid": "r", "object": make_object()}}).encode()
        assert (await post(webhook, store.trusted, request))[0] == 200
        await webhook.close()

    asyncio.run(run())


def test_an_external_certificate_is_read_from_its_files_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        store = Store()
        webhook = make_webhook(store, files=str(tmp_path))
        with pytest.raises(OSError, match=r"has no tls\.crt"):
            await webhook.look()
        bundle = certificates.renew(None, NAMES, now=certificates.utc_now())
        assert bundle is not None
        (tmp_path / "tls.crt").write_bytes(bundle.certificate)
        (tmp_path / "tls.key").write_bytes(bundle.key)
        await webhook.look()
        request = json.dumps({"request": {"uid": "r", "object": make_object()}}).encode()
        assert (await post(webhook, bundle.authority, request))[0] == 200
        assert store.writes == []
        await webhook.close()

    asyncio.run(run())


def test_a_secret_left_by_cert_manager_is_taken_over_with_its_type() -> None:
    async def run() -> None:
        store = Store()
        left = certificates.renew(None, NAMES, now=certificates.utc_now())
        assert left is not None
        data = certificates.write_bundle(left)
        del data["ca.key"]
        store.secrets["certificate"] = {
            "metadata": {"name": "certificate", "namespace": "evergrad"},
            "type": "kubernetes.io/tls",
            "data": data,
        }
        webhook = make_webhook(store)
        await webhook.look()
        assert store.writes == ["replace", "apply"]
        assert store.secrets["certificate"]["type"] == "kubernetes.io/tls"
        request = json.dumps({"request": {"uid": "r", "object": make_object()}}).encode()
        assert (await post(webhook, store.trusted, request))[0] == 200
        await webhook.close()

    asyncio.run(run())


def test_a_missing_object_is_reported_once_and_does_not_stop_the_webhook(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        store = Store()
        store.configuration = None
        webhook = make_webhook(store)
        task = asyncio.create_task(webhook.run())
        while not caplog.records:
            await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()
        await webhook.close()

    asyncio.run(run())
    assert "there is no ValidatingWebhookConfiguration evergrad" in caplog.text


def test_mismatched_files_leave_the_served_certificate_in_place(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        webhook = make_webhook(Store(), files=str(tmp_path))
        first, second = (
            certificates.renew(None, NAMES, now=certificates.utc_now()) for _ in range(2)
        )
        assert first is not None and second is not None
        (tmp_path / "tls.crt").write_bytes(first.certificate)
        (tmp_path / "tls.key").write_bytes(first.key)
        await webhook.look()
        (tmp_path / "tls.crt").write_bytes(second.certificate)
        with pytest.raises(ssl.SSLError):
            await webhook.look()
        request = json.dumps({"request": {"uid": "r", "object": make_object()}}).encode()
        assert (await post(webhook, first.authority, request))[0] == 200
        (tmp_path / "tls.key").write_bytes(second.key)
        await webhook.look()
        assert (await post(webhook, second.authority, request))[0] == 200
        await webhook.close()

    asyncio.run(run())


def test_an_object_nested_too_deeply_for_a_list_of_runs_is_denied() -> None:
    async def run() -> None:
        store = Store()
        webhook = make_webhook(store)
        answers: list[bool] = []
        webhook.on_review = answers.append
        await webhook.look()
        deep = '{"a":' * 9000 + "0" + "}" * 9000
        review = f'{{"kind":"AdmissionReview","request":{{"uid":"r-7","object":{{"spec":{deep}}}}}}}'
        status, answer = await post(webhook, store.trusted, review.encode())
        assert (status, answer["response"]["uid"], answer["response"]["allowed"]) == (
            200,
            "r-7",
            False,
        )
        assert "nested too deeply" in answer["response"]["status"]["message"]
        assert answers == [False]
        await webhook.close()

    asyncio.run(run())


def test_an_unexpected_error_does_not_stop_the_operator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        store = Store()
        store.secrets["certificate"] = {"data": "no mapping"}
        webhook = make_webhook(store)
        task = asyncio.create_task(webhook.run())
        while not caplog.records and not task.done():
            await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()

    asyncio.run(run())
    assert "a defect of the operator" in caplog.text
