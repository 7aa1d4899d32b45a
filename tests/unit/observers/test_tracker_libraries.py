"""The libraries of trackers: the data that each receives, and that it shows one run without gaps after kills.

TensorBoard is installed. The others run in tests/integration/run/test_observers.py if they are installed,
and here against their documented behaviour.
"""

import posixpath
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from evergrad_manifest.training import Tracker
from evergrad_trainer.observers.trackers.interface import (
    CLOSING_SECONDS,
    End,
    Shown,
    TrackedRun,
)
from evergrad_trainer.observers.trackers.libraries import find_opener


def tracked(path: Path, type_: str, **changes: Any) -> TrackedRun:
    """A run as described to its tracker."""
    known = {
        "run_id": "id1",
        "name": "docs",
        "settings": Tracker.model_validate({"type": type_, "tags": ["a tag"]}),
        "directory": path,
        "facts": {
            "model": "llama",
            "training": {"optimizer": {"learningRate": 1e-3}, "none": None},
        },
        "start_step": 0,
        "own_id": "",
        "noted": Shown(),
    }
    return TrackedRun(**{**known, **changes})


def read_event_files(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], list[str]]:
    """Return the content that TensorBoard shows of a folder: scalars by name, and the names of texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    shown.Reload()
    tags = shown.Tags()
    scalars = {
        name: [(one.step, one.value) for one in shown.Scalars(name)]
        for name in tags["scalars"]
    }
    return scalars, tags["tensors"]


@pytest.mark.capability("O-77")
def test_tensorboard_shows_each_step_once_as_it_was_last_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the second process's host is behind, and the first process was killed in the middle of a
    record."""
    pytest.importorskip("tensorboard")
    folder = tmp_path / "files"
    open_library = find_opener("tensorboard")
    first = open_library(tracked(folder, "tensorboard"))
    assert first.shown == Shown(0, {}, -1)
    first.write(0, 0.0, {"evaluation/held/loss": 9.0})
    for step in range(1, 8):
        first.write(step, 0.0, {"train/loss": float(step)})
    first.flush()
    (path,) = folder.iterdir()
    with path.open("ab") as file:
        file.write(b"\x18\0\0\0torn")

    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    second = open_library(
        tracked(folder, "tensorboard", start_step=5, noted=Shown(6, {"held": 0}))
    )
    # Step 5 is written once more: of it an evaluation may be missing.
    assert second.shown == Shown(4, {}, 4)
    for step in range(5, 10):
        second.write(step, 0.0, {"train/loss": 10.0 * step})
    second.note("checkpoint/step-5", "sha256:ab")
    second.finish("complete")
    scalars, texts = read_event_files(folder)
    expected = [(step, float(step)) for step in range(1, 5)]
    expected += [(step, 10.0 * step) for step in range(5, 10)]
    assert scalars["train/loss"] == expected
    assert scalars["evaluation/held/loss"] == [(0, 9.0)]
    assert {"run", "tag/a tag", "checkpoint/step-5"} <= set(texts)
    first.finish("handed on")


class FakeWandb:
    """wandb.init, its settings and the run that it returns, as documented for wandb 0.31.

    It takes no other names, as wandb takes none: a setting that it does not have is an error there.
    """

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float], bool]] = []
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.ends: list[int] = []
        self.starting_step = 0

    def init(
        self,
        *,
        entity: str | None = None,
        project: str | None = None,
        dir: str | None = None,
        id: str | None = None,
        name: str | None = None,
        tags: list[str] | None = None,
        mode: Literal["online", "offline", "disabled", "shared"] | None = None,
        reinit: Literal["default", "return_previous", "finish_previous", "create_new"]
        | None = None,
        resume: Literal["allow", "never", "must", "auto"] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> Any:
        options = dict(locals())
        del options["self"]
        self.inits.append(options)
        config = SimpleNamespace(
            update=lambda facts, allow_val_change: self.config.update(facts)
        )
        return SimpleNamespace(
            config=config,
            summary=self.summary,
            starting_step=self.starting_step,
            log=lambda row, step, commit: self.rows.append((step, dict(row), commit)),
            finish=self._finish,
        )

    def _finish(self, exit_code: int) -> None:
        self.ends.append(exit_code)

    @staticmethod
    def Settings(
        *,
        base_url: str = "https://api.wandb.ai",
        console: Literal[
            "auto", "off", "wrap", "redirect", "wrap_raw", "wrap_emu"
        ] = "auto",
        disable_code: bool = False,
        disable_git: bool = False,
        finish_timeout: float = 0.0,
        silent: bool = False,
        x_disable_stats: bool = False,
    ) -> dict[str, Any]:
        return dict(locals())


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    monkeypatch.setitem(
        sys.modules,
        "wandb.proto.wandb_internal_pb2",
        SimpleNamespace(),  # type: ignore[arg-type]
    )
    return fake


@pytest.mark.capability("A-8", "A-48", "T-36")
def test_wandb_gets_one_id_and_whole_rows(tmp_path: Path, fake_wandb: FakeWandb) -> None:
    library = find_opener("wandb")(tracked(tmp_path / "wandb", "wandb"))
    for step in (1, 2):
        library.write(step, 0.0, {"train/loss": float(step)})
    library.write(2, 0.0, {"evaluation/held/loss": 3.0})
    library.finish("handed on")
    # The newest step may still get an evaluation, which the next process of the run writes.
    assert fake_wandb.rows == [(1, {"train/loss": 1.0}, True)]
    other = find_opener("wandb")(tracked(tmp_path / "wandb", "wandb"))
    other.write(2, 0.0, {"train/loss": 2.0})
    other.write(2, 0.0, {"evaluation/held/loss": 3.0})
    other.finish("complete")
    assert fake_wandb.rows[1:] == [
        (2, {"train/loss": 2.0, "evaluation/held/loss": 3.0}, True)
    ]
    assert fake_wandb.ends == [0, 0]
    keys = ("id", "resume", "mode", "project", "name", "tags")
    first, second = ([one[key] for key in keys] for one in fake_wandb.inits)
    assert first == second == ["id1", "allow", "offline", "evergrad", "docs", ["a tag"]]
    assert fake_wandb.config["training"]["optimizer"] == {"learningRate": 1e-3}


@pytest.mark.parametrize(
    ("end", "is_whole", "code"),
    [
        ("complete", True, 0),
        ("stopped", True, 0),
        ("interrupted", False, 0),
        ("failed", False, 1),
        ("handed on", False, 0),
    ],
)
def test_wandb_online_leaves_a_step_to_the_next_start_if_its_evaluation_may_be_incomplete(
    tmp_path: Path, fake_wandb: FakeWandb, end: End, is_whole: bool, code: int
) -> None:
    """The server accepts no additions to a row, so the next start sends only the evaluation."""
    settings = Tracker.model_validate({"type": "wandb", "mode": "online"})
    first = find_opener("wandb")(tracked(tmp_path, "wandb", settings=settings))
    first.write(1, 0.0, {"train/loss": 1.0})
    first.finish(end)
    assert fake_wandb.rows == ([(1, {"train/loss": 1.0}, True)] if is_whole else [])
    assert fake_wandb.ends == [code]

    fake_wandb.starting_step = 2 if is_whole else 1
    second = find_opener("wandb")(
        tracked(tmp_path, "wandb", settings=settings, start_step=1, own_id="id1")
    )
    assert second.shown.has_evaluation("held", 1) == is_whole


@pytest.mark.capability("A-8", "A-48", "T-36")
def test_wandb_online_resumes_at_the_state_of_the_server(
    tmp_path: Path, fake_wandb: FakeWandb
) -> None:
    fake_wandb.starting_step = 8
    named = {"entity": "us", "project": "ours", "name": "first"}
    online = {"type": "wandb", "mode": "online", "url": "https://here", **named}
    settings = Tracker.model_validate(online)
    library = find_opener("wandb")(tracked(tmp_path, "wandb", settings=settings))
    assert library.shown == Shown(7, {}, 7)
    (options,) = fake_wandb.inits
    assert options["mode"] == "online" and named.items() <= options.items()
    # Nothing is collected by default.
    quiet = {
        "console": "off",
        "disable_code": True,
        "disable_git": True,
        "x_disable_stats": True,
    }
    assert quiet.items() <= options["settings"].items()
    assert options["settings"]["base_url"] == "https://here"


def test_the_end_of_a_process_waits_for_wandb_online_for_a_bounded_time(
    tmp_path: Path, fake_wandb: FakeWandb
) -> None:
    for mode in ("online", "offline"):
        settings = Tracker.model_validate({"type": "wandb", "mode": mode})
        find_opener("wandb")(tracked(tmp_path / mode, "wandb", settings=settings))
    online, offline = (options["settings"] for options in fake_wandb.inits)
    # By default it waits without a limit; files are written immediately.
    assert (online["finish_timeout"], offline["finish_timeout"]) == (CLOSING_SECONDS, 0.0)


class FakeStore:
    """mlflow's tracking client over a store in memory, as documented."""

    def __init__(self) -> None:
        self.uris: list[str | None] = []
        self.is_killed = False
        self.num_batches, self.killed_in = 0, -1
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, Any] = {}

    def client(self, tracking_uri: str | None) -> "FakeStore":
        self.uris.append(tracking_uri)
        return self

    def search_experiments(self) -> list[Any]:
        """If no database exists, the first response to a client creates it."""
        Path(str(self.uris[-1]).removeprefix("sqlite:///")).write_bytes(b"half")
        if self.is_killed:
            raise KeyboardInterrupt
        return []

    def get_experiment_by_name(self, name: str) -> Any:
        found = self.experiments.get(name)
        return None if found is None else SimpleNamespace(experiment_id=found)

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        self.experiments[name] = "7"
        return "7"

    def search_runs(self, numbers: list[str], query: str) -> list[Any]:
        wanted = query.partition("= '")[2].rstrip("'")
        return [
            SimpleNamespace(info=SimpleNamespace(run_id=key))
            for key, run in self.runs.items()
            if run["tags"]["evergrad.run_id"] == wanted
        ]

    def create_run(self, number: str, tags: dict[str, str], run_name: str) -> Any:
        self.refuse(tags)
        key = f"run-{len(self.runs)}"
        self.runs[key] = {"tags": tags, "metrics": [], "params": {}, "status": "RUNNING"}
        return SimpleNamespace(info=SimpleNamespace(run_id=key))

    def update_run(self, key: str, status: str) -> None:
        self.runs[key]["status"] = status

    def set_terminated(self, key: str, status: str) -> None:
        self.runs[key]["status"] = status

    def set_tag(self, key: str, name: str, text: str) -> None:
        self.refuse([name])
        self.runs[key]["tags"][name] = text

    def log_batch(self, key: str, metrics: Any = (), params: Any = ()) -> None:
        self.refuse([*(one[0] for one in metrics), *(one[0] for one in params)])
        self.num_batches += 1
        if self.num_batches == self.killed_in:
            raise KeyboardInterrupt
        known = self.runs[key]["params"]
        for name, value in params:
            assert known.setdefault(name, value) == value, "a parameter never changes"
        self.runs[key]["metrics"] += metrics

    @staticmethod
    def refuse(names: Iterable[str]) -> None:
        for name in names:
            is_path = posixpath.normpath(name) == name
            if not (re.fullmatch(r"[/\w.\- :]{1,250}", name) and is_path):
                raise ValueError(f"{name!r} is refused")

    def get_run(self, key: str) -> Any:
        run = self.runs[key]
        names = {metric[0] for metric in run["metrics"]}
        data = {"params": dict(run["params"]), "tags": dict(run["tags"])}
        return SimpleNamespace(
            data=SimpleNamespace(metrics=dict.fromkeys(names, 0.0), **data)
        )

    def get_metric_history(self, key: str, name: str) -> list[Any]:
        return [
            SimpleNamespace(step=metric[3])
            for metric in self.runs[key]["metrics"]
            if metric[0] == name
        ]


@pytest.fixture
def fake_store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    fake = FakeStore()
    entities = SimpleNamespace(Metric=lambda *args: args, Param=lambda *args: args)
    monkeypatch.setitem(
        sys.modules,
        "mlflow.tracking",
        SimpleNamespace(MlflowClient=fake.client),  # type: ignore[arg-type]
    )
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)  # type: ignore[arg-type]
    return fake


def test_mlflow_finds_its_run_by_the_tag_and_reports_what_it_shows(
    tmp_path: Path, fake_store: FakeStore
) -> None:
    open_library = find_opener("mlflow")
    first = open_library(tracked(tmp_path / "mlflow", "mlflow"))
    assert first.shown == Shown()
    for step in (1, 2):
        first.write(step, 1.5, {"train/learning_rate": 0.1, "train/loss": 2.0})
    first.write(2, 1.5, {"evaluation/held/loss": 3.0})
    first.flush()
    # Given, and not yet sent: lost in the kill.
    first.write(3, 1.5, {"train/learning_rate": 0.1})

    second = open_library(tracked(tmp_path / "mlflow", "mlflow", start_step=1))
    assert second.own_id == first.own_id
    assert second.shown == Shown(2, {"held": 2})
    second.finish("stopped")
    (run,) = fake_store.runs.values()
    assert run["status"] == "KILLED" and run["params"]["training.none"] == "null"
    assert run["metrics"][1] == ("train/learning_rate", 0.1, 1500, 1)
    assert fake_store.uris[1:] == [f"sqlite:///{tmp_path}/mlflow/mlflow.db"] * 2


def test_names_that_mlflow_refuses_are_changed_and_recognised_by_the_next_process(
    tmp_path: Path, fake_store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Metrics of an evaluator, its set and keys of model.config may have any characters."""
    settings = Tracker.model_validate({"type": "mlflow", "tags": ["lr=1e-3", "lr@1e-3"]})
    labels = {"Very good (5)": 0, "Very good [5]": 1, "Very good _5_": 2, "x" * 300: 3}
    known: dict[str, Any] = {
        "settings": settings,
        "facts": {"label2id": {**labels, "a/../b": 4}},
    }
    row = {"train/learning_rate": 0.1, "train/acc@1": 1.0, "train/acc#1": 2.0}
    row |= {"train/acc_1": 3.0}
    open_library = find_opener("mlflow")
    first = open_library(tracked(tmp_path / "mlflow", "mlflow", **known))
    first.write(1, 0.0, row)
    first.write(1, 0.0, {"evaluation/a@b/loss": 4.0})
    first.flush()
    assert "4 names that MLflow does not take are shown changed" in caplog.text
    assert "'train/acc#1' as 'train/acc_1-" in caplog.text

    # A name that was given and not shown before a kill keeps its own, too.
    first.write(2, 0.0, {"train/lost@1": 5.0})

    # The next process receives other names first, and shows each under its previous name.
    second = open_library(tracked(tmp_path / "mlflow", "mlflow", **known))
    assert second.shown == Shown(1, {"a@b": 1})
    for name in reversed(row):
        second.write(2, 0.0, {name: 10 * row[name]})
    second.write(2, 0.0, {"train/lost_1": 6.0, "train/lost@1": 5.0})
    second.flush()
    (run,) = fake_store.runs.values()
    curves: dict[str, list[float]] = {}
    for name, value, _, _ in run["metrics"]:
        curves.setdefault(name, []).append(value)
    assert curves.pop("evaluation/a_b/loss") == [4.0]
    assert curves.pop("train/lost_1") == [5.0] and [6.0] in curves.values()
    curves = {name: values for name, values in curves.items() if values != [6.0]}
    assert sorted(curves.values()) == [[0.1, 1.0], [1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]
    assert curves["train/acc_1"] == [3.0, 30.0]
    values = sorted(run["params"].items(), key=lambda one: one[1])
    assert [value for _, value in values] == ["0", "1", "2", "3", "4"]
    assert values[2][0] == "label2id.Very good _5_" and values[4][0] == "label2id.a/_/b"
    assert {"lr=1e-3", "lr@1e-3"} <= set(run["tags"].values())


def test_mlflow_gets_the_parameters_that_a_kill_had_prevented(
    tmp_path: Path, fake_store: FakeStore
) -> None:
    facts = {f"key{number:03}": number for number in range(150)}
    open_library = find_opener("mlflow")
    fake_store.killed_in = 2
    with pytest.raises(KeyboardInterrupt):
        open_library(tracked(tmp_path / "mlflow", "mlflow", facts=facts))
    (run,) = fake_store.runs.values()
    assert len(run["params"]) == 100
    # One that has changed since stays as it was.
    facts["key000"] = -1
    open_library(tracked(tmp_path / "mlflow", "mlflow", facts=facts))
    assert len(run["params"]) == 150 and run["params"]["key000"] == "0"


@pytest.mark.parametrize("num_values", [9, 700])
def test_a_kill_between_two_requests_leaves_no_incomplete_step_in_mlflow(
    tmp_path: Path, fake_store: FakeStore, num_values: int
) -> None:
    open_library = find_opener("mlflow")
    first = open_library(tracked(tmp_path / "mlflow", "mlflow", facts={}))
    row = {f"train/metric_{number}": 1.0 for number in range(num_values - 2)}
    row = {"train/learning_rate": 0.1, **row, "train/loss": 2.0}
    fake_store.killed_in = fake_store.num_batches + 2
    with pytest.raises(KeyboardInterrupt):
        for step in range(1, 200):
            first.write(step, 0.0, row)
    second = open_library(tracked(tmp_path / "mlflow", "mlflow", facts={}))
    (run,) = fake_store.runs.values()
    steps = [step for _, _, _, step in run["metrics"]]
    assert steps
    assert second.shown.step == (max(steps) if num_values == 9 else 0)
    for step in range(1, second.shown.step + 1):
        assert steps.count(step) == num_values


def test_an_incomplete_mlflow_database_left_by_a_kill_is_never_opened(
    tmp_path: Path, fake_store: FakeStore
) -> None:
    folder = tmp_path / "mlflow"
    folder.mkdir()
    # A process that was killed has left this file.
    (folder / ".mlflow.db.1").write_bytes(b"half")
    open_library = find_opener("mlflow")
    fake_store.is_killed = True
    with pytest.raises(KeyboardInterrupt):
        open_library(tracked(folder, "mlflow"))
    assert list(folder.iterdir()) == []
    fake_store.is_killed = False
    open_library(tracked(folder, "mlflow"))
    assert [path.name for path in folder.iterdir()] == ["mlflow.db"]
    making, there = fake_store.uris[1:]
    assert making != there == f"sqlite:///{folder}/mlflow.db"


@pytest.mark.parametrize(
    ("type_", "variable", "quiet"),
    [
        ("mlflow", "MLFLOW_DISABLE_TELEMETRY", "true"),
        ("wandb", "WANDB_ERROR_REPORTING", "false"),
    ],
)
def test_a_library_sends_no_telemetry_unless_the_environment_enables_it(
    type_: str, variable: str, quiet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look at the variable when they are imported, or start a process."""
    (tmp_path / f"{type_}.py").write_text(
        f"import os\nraise RuntimeError(os.environ.get({variable!r}))"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, type_, raising=False)
    # Set and delete the variable, so that a value set by the library's opener is removed after the test.
    monkeypatch.setenv(variable, "")
    monkeypatch.delenv(variable)
    for expected in (quiet, "its own"):
        with pytest.raises(RuntimeError, match=f"^{expected}$"):
            find_opener(type_)(tracked(tmp_path / "files", type_))
        monkeypatch.setenv(variable, "its own")


@pytest.mark.capability("C-X1")
def test_aim_reopens_the_run_by_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[dict[str, Any]] = []
    values: dict[tuple[str, int], float] = {}

    class Run:
        def __init__(self, **options: Any) -> None:
            opened.append(options)
            self.hash = options.get("run_hash", "hash1")
            self.name = ""

        def track(self, value: float, name: str, step: int) -> None:
            values[name, step] = value

        def set(self, key: str, value: Any, strict: bool) -> None: ...

        def add_tag(self, tag: str) -> None: ...

        def close(self) -> None: ...

    repo = SimpleNamespace(exists=lambda place: False, from_path=lambda place, init: None)
    monkeypatch.setitem(sys.modules, "aim", SimpleNamespace(Run=Run, Repo=repo))  # type: ignore[arg-type]
    open_library = find_opener("aim")
    first = open_library(tracked(tmp_path / "aim", "aim"))
    first.write(1, 0.0, {"train/loss": 2.0})
    noted = Shown(1)
    second = open_library(
        tracked(tmp_path / "aim", "aim", own_id=first.own_id, noted=noted, start_step=1)
    )
    assert second.shown == Shown(0, {}, 0)
    second.write(1, 0.0, {"train/loss": 3.0})
    second.finish("complete")
    assert values == {("train/loss", 1): 3.0}
    assert "run_hash" not in opened[0] and opened[0]["experiment"] == "evergrad"
    assert (opened[1]["run_hash"], opened[1]["force_resume"]) == ("hash1", True)
