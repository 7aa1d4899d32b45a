"""Files, overlays and --set: merged values, refused values, and the place that a message names."""

import os
import stat
import threading
from pathlib import Path

import pytest

from evergrad_cli.main import main
from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_manifest.reading.loader import MAX_BYTES, LoadedManifest, load_manifest
from evergrad_manifest.reading.overrides import Override, parse_override, parse_path

BASE = (Path(__file__).parent / "base_manifest.yaml").read_text()


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "trainingrun.yaml"
    path.write_text(BASE)
    return path


def problems(
    path: Path | str, overlays: list[Path] | None = None, overrides: list[str] | None = None
) -> list[str]:
    with pytest.raises(ConfigurationError) as refused:
        load_manifest(path, overlays=overlays or [], overrides=overrides or [])
    assert all(problem.path and problem.what for problem in refused.value.problems)
    return [str(problem) for problem in refused.value.problems]


def overlay(folder: Path, text: str, name: str = "over.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_manifest_is_loaded_with_its_source(
    manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(manifest.parent.parent)
    relative = Path(manifest.parent.name) / manifest.name
    loaded = load_manifest(str(relative))
    assert isinstance(loaded, LoadedManifest)
    assert loaded.path == relative
    assert loaded.base_directory == manifest.parent
    assert loaded.raw["spec"]["training"]["horizon"] == {"tokens": "20M"}
    assert loaded.run.spec.training.horizon.tokens == 20_000_000


@pytest.mark.capability("C-16", "T-1", "G-95")
def test_a_run_has_the_name_labels_nodes_and_resources_of_its_manifest(
    manifest: Path,
) -> None:
    given = [
        "metadata.name=docs-lm-2",
        "metadata.labels={project: docs, group: sweeps}",
        "spec.nodes={min: 2, max: 6}",
        "metadata.annotations={limitations: read once}",
        "spec.workersPerNode=1",
        "spec.resources={requests: {cpu: '8'}, limits: {memory: 64Gi}}",
    ]
    run = load_manifest(manifest, overrides=given).run
    assert run.metadata.name == "docs-lm-2"
    assert run.metadata.annotations == {"limitations": "read once"}
    assert run.metadata.labels == {"project": "docs", "group": "sweeps"}
    assert (run.spec.nodes.min, run.spec.nodes.max, run.spec.workers_per_node) == (2, 6, 1)
    assert run.spec.resources is not None
    wire = run.spec.resources.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert wire["requests"]["cpu"] == "8" and wire["limits"]["memory"] == "64Gi"


def test_the_base_directory_is_the_directory_of_the_link_and_not_of_its_target(
    manifest: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    (folder / "run.yaml").symlink_to(manifest)
    assert load_manifest(folder / "run.yaml").base_directory == folder


def test_unusable_files_are_refused_by_name(tmp_path: Path) -> None:
    assert problems(tmp_path / "no.yaml") == [
        f"{tmp_path}/no.yaml: does not exist. Check the path."
    ]
    assert problems(tmp_path) == [f"{tmp_path}: is a directory. Name the file in it."]
    plain = overlay(tmp_path, "x", "plain")
    assert "a part of the path is a file" in problems(plain / "x.yaml")[0]
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "symbolic links form a loop" in problems(loop)[0]
    assert "cannot be read" in problems("a\0b")[0]
    assert "too long" in problems("x" * 5000)[0]
    assert (
        "is too large; the largest manifest read is 1048576 bytes"
        in problems("/dev/zero")[0]
    )
    assert "is empty" in problems("/dev/null")[0]


def test_a_file_without_permission_is_refused(manifest: Path) -> None:
    manifest.chmod(stat.S_IWUSR)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        assert "cannot be read; permission is denied" in problems(manifest)[0]
    finally:
        os.seteuid(user)


def test_a_file_of_the_largest_size_is_read_and_one_byte_more_is_refused(
    manifest: Path,
) -> None:
    filler = MAX_BYTES - len(BASE.encode()) - 1
    line = "#" * 1000 + "\n"
    comment = line * (filler // len(line)) + "#" * (filler % len(line))
    manifest.write_text(f"{BASE}{comment}\n")
    assert manifest.stat().st_size == MAX_BYTES
    assert load_manifest(manifest).run.metadata.name == "docs-lm"
    manifest.write_text(f"{BASE}{comment}#\n")
    assert "is too large" in problems(manifest)[0]


def test_a_manifest_can_be_read_from_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(BASE))
    writer.start()
    try:
        assert load_manifest(pipe).run.metadata.name == "docs-lm"
    finally:
        writer.join()


def test_text_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("a: 1\nb: é\n".encode("latin-1"))
    assert problems(path) == [
        f"{path}:2: is not UTF-8 text; byte 9, in line 2, is 0xe9. Save it as UTF-8."
    ]
    path.write_bytes(BASE.encode("utf-16"))
    assert "is not UTF-8 text; byte 1, in line 1, is 0xff" in problems(path)[0]


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert load_manifest(path).run.metadata.name == "docs-lm"


def test_a_document_that_is_not_a_mapping_is_refused(tmp_path: Path) -> None:
    assert "contains a list and not a mapping" in problems(overlay(tmp_path, "- 1"))[0]
    assert (
        "contains only the value 3 and not a mapping" in problems(overlay(tmp_path, "3"))[0]
    )


def test_a_duplicate_key_does_not_hide_the_other_problems(manifest: Path) -> None:
    manifest.write_text(
        BASE.replace(
            "      learningRate: 1e-3",
            "      learningRate: 1e-3\n      learningRate: 2\n      betaz: 3",
        )
    )
    twice, unknown = problems(manifest)
    assert twice.startswith(
        "spec.training.optimizer.learningRate: the key is given twice, in lines 24 and 25; only one"
    )
    assert unknown.startswith(
        "spec.training.optimizer.betaz: unknown key (line 26); did you mean `betas`? Known here: type,"
    )


def test_a_value_that_cannot_be_parsed_is_reported_once(manifest: Path) -> None:
    manifest.write_text(BASE.replace("learningRate: 1e-3", "learningRate: .nan"))
    assert problems(manifest) == [
        (
            "spec.training.optimizer.learningRate: '.nan' is not a finite number (line 24). Write a "
            "finite number."
        )
    ]


def test_a_bare_on_or_off_is_valid_for_compile(manifest: Path) -> None:
    for word, meant in (
        ("on", "on"),
        ("off", "off"),
        ("auto", "auto"),
        ("'on'", "on"),
        ("true", "on"),
    ):
        assert (
            load_manifest(
                manifest, overrides=[f"spec.training.runtime.compile={word}"]
            ).run.spec.training.runtime.compile
            == meant
        )


@pytest.mark.capability("C-5")
def test_overlays_merge_mappings_replace_lists_and_remove_by_null(
    manifest: Path, tmp_path: Path
) -> None:
    first = overlay(
        tmp_path,
        "spec: {training: {optimizer: {learningRate: 1}, horizon: {tokens: null, steps: 10}}}",
    )
    second = overlay(
        tmp_path,
        (
            "spec: {training: {optimizer: {learningRate: 2}, data: {sources: [{name: b, path: b}, "
            "{name: c, path: c}]}}}"
        ),
        "second.yaml",
    )
    training = load_manifest(manifest, overlays=[first, second]).run.spec.training
    assert training.optimizer.learning_rate == 2
    assert training.horizon.steps == 10 and training.horizon.tokens is None
    assert [source.name for source in training.data.sources] == ["b", "c"]
    assert training.data.sequence_length == 256
    assert (
        load_manifest(
            manifest, overlays=[second, first]
        ).run.spec.training.optimizer.learning_rate
        == 1
    )


def test_removal_of_an_absent_key_is_accepted_but_of_an_unknown_key_refused(
    manifest: Path, tmp_path: Path
) -> None:
    assert load_manifest(
        manifest,
        overlays=[overlay(tmp_path, "spec: {training: {stop: null, initFrom: null}}")],
    )
    slip = overlay(tmp_path, "spec: {training: {horizn: null}}")
    assert problems(manifest, [slip]) == [
        (
            f"spec.training.horizn: there is no such key to remove ({slip} line 1). Correct the key, "
            "or take the line out."
        )
    ]
    assert (
        "there is no such key to remove (--set)"
        in problems(manifest, overrides=["spec.training.horizn=null"])[0]
    )


def test_problems_name_the_file_or_argument_of_a_value(
    manifest: Path, tmp_path: Path
) -> None:
    over = overlay(tmp_path, "spec:\n  training:\n    data:\n      sequenceLength: 3\n")
    said = problems(
        manifest, [over], ["spec.training.horizon.tokens=x", "spec.nodes.max=1"]
    )
    assert any(f"3 is too small ({over} line 4)" in line for line in said)
    assert any("'x' is not a number (--set)" in line for line in said)
    assert any("1 is below nodes.min 2 (--set)" in line for line in said)


def test_large_files_are_checked_and_the_list_of_problems_is_truncated(
    manifest: Path, tmp_path: Path
) -> None:
    keys = [f"key{number}" for number in range(9000)]
    wide = overlay(tmp_path, "spec: {" + ", ".join(f"{key}: .nan" for key in keys) + "}")
    said = problems(manifest, [wide, wide])
    assert len(said) == 101 and "more problems are not listed" in said[-1]


def test_all_broken_files_and_arguments_are_reported_together(
    manifest: Path, tmp_path: Path
) -> None:
    broken = overlay(tmp_path, "a: [", "broken.yaml")
    doubled = overlay(tmp_path, "{spec: {}, spec: {}}", "doubled.yaml")
    said = problems(manifest, [broken, doubled, tmp_path / "no.yaml"], ["foo"])
    assert len(said) == 4
    assert any("broken.yaml" in line for line in said) and any(
        "doubled.yaml" in line for line in said
    )
    assert any("no.yaml: does not exist" in line for line in said) and any(
        "--set 'foo': has no value" in line for line in said
    )


@pytest.mark.capability("G-X13", "O-X3", "T-X15")
@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("a=1", ("a",), 1),
        ("a.b=x", ("a", "b"), "x"),
        ("a.0.b=x", ("a", 0, "b"), "x"),
        ("a[0].b=x", ("a", 0, "b"), "x"),
        ("a[0][1]=x", ("a", 0, 1), "x"),
        ('a["x.y/z"].c=1', ("a", "x.y/z", "c"), 1),
        ("a['x=y']=1", ("a", "x=y"), 1),
        ("a=b=c", ("a",), "b=c"),
        ("a=3e-4", ("a",), 0.0003),
        ("a=20M", ("a",), "20M"),
        ("a=null", ("a",), None),
        ("a=''", ("a",), ""),
        ("a=true", ("a",), True),
        ("a=[1, x]", ("a",), [1, "x"]),
        ("a={b: 1}", ("a",), {"b": 1}),
        ('a="b: c"', ("a",), "b: c"),
        ("a=C:/x", ("a",), "C:/x"),
        ("a=-1", ("a",), -1),
        ("a= 1 ", ("a",), 1),
    ],
)
def test_an_override_is_a_path_and_a_yaml_value(
    text: str, path: tuple[str | int, ...], value: object
) -> None:
    override = parse_override(text)
    assert isinstance(override, Override)
    assert override.path == path
    assert override.value == value and type(override.value) is type(value)


NO_PATHS = [
    "",
    "a",
    "=1",
    ".a=1",
    "a.=1",
    "a..b=1",
    "a[=1",
    "a[x]=1",
    "a[-1]=1",
    "0=1",
    "[0]=1",
    "a b=1",
    'a["x]=1',
    "a=",
    "a= ",
]
NO_VALUES = [
    "a=b: c",
    "a=- 1",
    "a=[1",
    "a={x: 1, x: 2}",
    "a=.nan",
    "a=\x01",
    "a=1\n---\n2",
    "a=&a [*a]",
    "a=x\nb: 1",
    "a=!!set {}",
    "a=%",
]


@pytest.mark.parametrize("text", [*NO_PATHS, *NO_VALUES])
def test_a_malformed_override_is_refused_and_quoted(text: str) -> None:
    problem = parse_override(text)
    assert isinstance(problem, Problem)
    assert problem.path.startswith("--set ") and problem.what
    assert str(problem).isprintable()


def test_overrides_index_lists_append_and_create_mappings(manifest: Path) -> None:
    training = load_manifest(
        manifest,
        overrides=[
            "spec.training.data.sources.0.path=other.jsonl",
            "spec.training.data.sources[1]={name: more, path: more.jsonl}",
            "spec.training.data.sources[1].weight=2",
            "spec.training.stop.afterStep=10",
            'metadata.labels["example.com/team"]=research',
        ],
    ).run
    assert [source.path for source in training.spec.training.data.sources] == [
        "other.jsonl",
        "more.jsonl",
    ]
    assert training.spec.training.data.sources[1].weight == 2
    assert training.spec.training.stop.after_step == 10
    assert training.metadata.labels == {"example.com/team": "research"}


def test_overrides_apply_after_overlays_and_the_last_one_wins(
    manifest: Path, tmp_path: Path
) -> None:
    over = overlay(tmp_path, "spec: {training: {optimizer: {learningRate: 1}}}")
    path = "spec.training.optimizer.learningRate"
    loaded = load_manifest(manifest, overlays=[over], overrides=[f"{path}=2", f"{path}=3"])
    assert loaded.run.spec.training.optimizer.learning_rate == 3


def test_an_override_that_does_not_fit_is_refused_with_the_reason(manifest: Path) -> None:
    assert problems(manifest, overrides=["spec.training.data.sources[3].path=x"]) == [
        (
            "spec.training.data.sources[3]: there is no such item; the list has 1 item (--set). Use "
            "a number from 0 to 1."
        )
    ]
    assert (
        "false has no keys, so spec.suspend.x cannot be set"
        in problems(manifest, overrides=["spec.suspend.x=1"])[0]
    )
    assert (
        "an item of a list cannot be removed"
        in problems(manifest, overrides=["spec.training.data.sources[0]=null"])[0]
    )
    assert (
        "did you mean `learningRate`?"
        in problems(manifest, overrides=["spec.training.optimizer.lerningRate=1"])[0]
    )


def test_an_override_of_an_unparsable_value_is_checked_too(
    manifest: Path,
) -> None:
    manifest.write_text(BASE.replace("learningRate: 1e-3", "learningRate: .nan"))
    said = problems(manifest, overrides=["spec.training.optimizer.learningRate=x"])
    assert (
        len(said) == 2 and "'.nan'" in said[0] and "'x' is not a number (--set)" in said[1]
    )


def test_a_path_is_parsed_or_refused() -> None:
    assert parse_path("spec.nodes") == ("spec", "nodes")
    assert parse_path("a[12]") == ("a", 12)
    assert parse_path("") is None
    assert parse_path("a]") is None


@pytest.mark.acceptance("input-2e-19")
@pytest.mark.capability("O-8")
def test_a_run_without_a_name_is_refused_and_no_name_is_generated(manifest: Path) -> None:
    """A name from the configuration's hash would make a new run of each change."""
    manifest.write_text(
        BASE.replace("metadata: {name: ", "metadata: {annotations: {}} # {name: ")
    )
    [said] = problems(manifest)
    assert said.startswith("metadata.name: missing; it has no default. Add `name`")
    assert main(["run", str(manifest)]) == 64


@pytest.mark.capability("O-27")
def test_anchors_and_aliases_repeat_a_value(manifest: Path) -> None:
    over = overlay(
        manifest.parent,
        "metadata: {annotations: {description: a first try}}\n"
        "spec: {training: {checkpoint: {every: &every {steps: 64}}, logging: {every: *every}}}\n",
    )
    run = load_manifest(manifest, overlays=[over]).run
    assert run.metadata.annotations == {"description": "a first try"}
    assert run.training.checkpoint.every.steps == 64
    assert run.training.logging.every.steps == 64
