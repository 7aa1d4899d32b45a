"""Rules of the bed that need no bed."""

import json
from pathlib import Path

import pytest

from bed import images, requirements, storage, toolbox
from bed.api import Api
from bed.places import families_named, in_url, node_named
from bed.shell import BedError


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [("64Mi", 64 * 2**20), ("1Gi", 2**30), ("1.5G", 1_500_000_000), ("1024", 1024)],
)
def test_a_storage_quantity_is_parsed_as_kubernetes_parses_it(
    quantity: str, expected: int
) -> None:
    assert storage.size_in_bytes(quantity) == expected


def test_a_tool_is_found_by_its_own_name_and_by_its_programs() -> None:
    assert toolbox.tool_of("kubectl") == toolbox.tool_of("kubernetes") == "kubernetes"
    with pytest.raises(ValueError, match="ruby: no tool of the bed"):
        toolbox.tool_of("ruby")


def test_a_program_answers_in_json_and_its_output_is_kept_if_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    monkeypatch.setattr(toolbox, "binary", lambda name: program)
    program.write_text("#!/bin/sh\ncat\n")
    program.chmod(0o755)
    assert toolbox.ask("lua", {"objects": [1]}) == {"objects": [1]}
    program.write_text("#!/bin/sh\necho no health script >&2; exit 3\n")
    with pytest.raises(BedError, match=r"exit code 3\.\nno health script"):
        toolbox.ask("lua", {})


def test_a_program_is_unavailable_only_if_it_is_not_built_and_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolbox.shutil, "which", lambda name: None)
    monkeypatch.setattr(toolbox, "_built", lambda name: None)
    assert toolbox.unavailable("argosync") == (
        "argosync is not built, and there is no `go` to build it."
    )
    monkeypatch.setattr(toolbox, "_built", Path)
    assert toolbox.unavailable("argosync") is None


@pytest.mark.parametrize("name", toolbox.TOOLS)
def test_every_tool_has_pinned_sources(name: str) -> None:
    folder = toolbox.SOURCES / name
    module = (folder / "go.mod").read_text()
    packages = [
        package for package in toolbox.TOOLS[name].packages.values() if package != "."
    ]
    assert all(package in module for package in packages)
    assert (folder / "go.sum").exists() or "require" not in module


def test_a_changed_source_changes_the_key_of_its_tool_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pause", "etcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "go.mod").write_text(f"module {name}\n")
    monkeypatch.setattr(toolbox, "SOURCES", tmp_path)
    before = {name: toolbox.key(name) for name in ("pause", "etcd")}
    (tmp_path / "pause" / "go.mod").write_text("module pause\n\ngo 1.99\n")
    assert toolbox.key("etcd") == before["etcd"]
    assert toolbox.key("pause") != before["pause"]


def test_if_the_bed_cannot_run_one_line_names_the_reason_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requirements.sys, "platform", "darwin")
    assert (
        requirements.unavailable()
        == "The bed needs Linux; this is darwin. Name another cluster with EVERGRAD_E2E_KUBECONFIG."
    )
    monkeypatch.setattr(requirements.sys, "platform", "linux")
    monkeypatch.setattr(requirements.os, "geteuid", lambda: 1000)
    assert "needs root" in (requirements.unavailable() or "")


def test_a_machine_with_cgroup_v2_only_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup.controllers").touch()
    monkeypatch.setattr(requirements, "CGROUPS", tmp_path)
    monkeypatch.setattr(requirements.sys, "platform", "linux")
    monkeypatch.setattr(requirements.os, "geteuid", lambda: 0)
    said = requirements.unavailable() or ""
    assert "this machine has only cgroup v2" in said
    assert "\n" not in said


def test_an_image_is_packed_without_the_layers_that_a_node_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERGRAD_CACHE", str(tmp_path))
    blobs = tmp_path / "images" / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    manifest = {
        "config": {"digest": "sha256:c"},
        "layers": [{"digest": "sha256:old"}, {"digest": "sha256:new"}],
    }
    for name, text in {
        "m": json.dumps(manifest),
        "c": "{}",
        "old": "old",
        "new": "new",
    }.items():
        (blobs / name).write_text(text)
    layout = images.layout_of("localhost/one:v1")
    layout.mkdir(parents=True)
    (layout / "name").write_text("localhost/one:v1")
    (layout / "index.json").write_text(json.dumps({"manifests": [{"digest": "sha256:m"}]}))
    images.pack(layout, {"sha256:old"}, tmp_path / "one.tar")
    packed = images.run(["tar", "-tf", tmp_path / "one.tar"]).split()
    assert {"blobs/sha256/m", "blobs/sha256/c", "blobs/sha256/new"} <= set(packed)
    assert "blobs/sha256/old" not in packed


def test_a_kubeconfig_that_names_files_is_read_relative_to_itself(tmp_path: Path) -> None:
    content = {
        "current-context": "one",
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}],
        "clusters": [{"name": "one", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "one", "user": {"token": "t"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(content))
    assert not Api(tmp_path / "kubeconfig").is_there(
        "/version"
    )  # no server listens there; only the read matters


def test_address_families_of_a_bed_are_used_in_the_given_order() -> None:
    assert [family.name for family in families_named("ipv6,ipv4")] == ["ipv6", "ipv4"]
    assert [family.name for family in families_named("ipv6")] == ["ipv6"]
    for text in ("", "ipv4,ipv4", "ipv6, ipv4", "ipv5"):
        with pytest.raises(
            ValueError, match=r"EVERGRAD_BED_FAMILIES: .* Write ipv4 or ipv6"
        ):
            families_named(text)
    assert in_url("10.100.0.1") == "10.100.0.1"
    assert in_url("fd00:100::1") == "[fd00:100::1]"


def test_a_missing_node_is_reported_with_the_existing_ones() -> None:
    with pytest.raises(ValueError, match=r"n3: no node of the bed\. It has n1, n2\."):
        node_named("n3")
