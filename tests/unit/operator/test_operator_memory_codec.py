"""The operator's memory in a run's status: written byte for byte as before, and read in every older form.

``GOLDEN=write make test PYTEST=tests/unit/operator/test_operator_memory_codec.py`` writes the reference again.
"""

import dataclasses
import hashlib
import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulated_run import START, make_run

from evergrad_operator.core.decision import Action, Decision
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.names import Phase, Reason
from evergrad_operator.core.objects.status_codec import encode
from evergrad_operator.core.observe.evaluation import EvaluationProgress, Tries
from evergrad_operator.core.observe.memory import (
    Budget,
    Coordinator,
    EndRecord,
    FirstStatus,
    HostFaults,
    LastFailure,
    Memory,
    RecordedFinish,
    RecordedInputError,
    RecordedTraining,
    parse_memory,
)
from evergrad_operator.core.observe.observe import Observation, observe
from evergrad_operator.core.observe.preparation import DataPreparation
from evergrad_operator.core.observe.spec import SpecCache
from evergrad_operator.core.observe.time_accounting import (
    USE_NAMES,
    PodTimeAccount,
    Reading,
)
from evergrad_operator.core.status.run_status import ApplyOutcome, build_status

GOLDEN = Path(__file__).parents[2] / "golden/memory.yaml"
MANY = 600
FEW = 12
"""Every third of these memories is in the reference as text. Of all memories it has a digest."""

# ---- memories of every kind --------------------------------------------------------------------------------


class Chance:
    """Draws values of one memory. Each field keeps its default in about two of five memories."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def is_set(self) -> bool:
        return self.random.random() < 0.6

    def number(self, most: int = 10_000) -> int:
        return self.random.choice((0, 1, 2, self.random.randint(0, most)))

    def time(self) -> float:
        whole = START + self.random.randint(-(10**8), 10**6)
        return self.random.choice((0.0, float(whole), whole + 0.75))

    def text(self) -> str:
        return self.random.choice(("a", "sha256:0f", 'quo"ted, x', "größe ✓", "x" * 40))

    def hosts(self) -> tuple[tuple[str, int], ...]:
        names = self.random.sample(range(20), self.random.randint(0, 8))
        return tuple((f"host-{name}", self.number()) for name in names)

    def times(self, hosts: tuple[tuple[str, int], ...]) -> tuple[tuple[str, float], ...]:
        return tuple((host, self.time()) for host, _ in hosts if self.is_set())

    def counters(self, *names: str) -> dict[str, int]:
        return {name: self.number() for name in names if self.is_set()}

    def some(self, **fields: Any) -> dict[str, Any]:
        """Return about three of five of the fields, and always draw all of them."""
        return {name: value for name, value in fields.items() if self.is_set()}


def make_memory(seed: int) -> Memory:
    chance = Chance(seed)
    causes = ("NodeLost", "WorkerCrash", "OutOfMemory", "CoordinatorLost", "Deleted")
    finish = RecordedFinish(
        chance.random.choice((Phase.COMPLETE, Phase.FAILED)),
        "Completed",
        chance.text(),
        chance.time(),
    )
    ends = tuple(
        EndRecord(
            f"run-{number}-0",
            chance.random.choice(causes),
            chance.random.choice((None, 0, 1, 137, -9)),
            chance.time(),
        )
        for number in range(chance.random.randint(0, 10))
    )
    failure = LastFailure(
        chance.random.choice(causes),
        chance.random.choice((None, 0, 3)),
        chance.text(),
        chance.time(),
        **chance.some(rank=chance.number(), step=chance.number(), exit_code=-9),
    )
    return Memory(
        is_known=True,
        **chance.some(
            image=chance.text(),
            image_id=chance.text(),
            image_pin=chance.text(),
            profile=chance.text(),
            profile_note=chance.text(),
            recipe_hash=chance.text(),
            restart=chance.number(),
            restart_nonce=chance.text(),
            settings_hash=chance.text(),
            told_changes=chance.text(),
            start_time=chance.time(),
            finishing_since=chance.time(),
            finish=finish if seed % 3 == 0 else None,
            stop_reason=chance.random.choice(
                (Reason.STOPPED.value, Reason.NON_FINITE.value)
            ),
            coordinator=make_coordinator(chance),
            attempts=tuple(
                chance.random.choice((-1, 0, 0, 1, chance.number()))
                for _ in range(chance.number(40))
            ),
            recorded=frozenset(chance.random.sample(range(64), chance.number(40))),
            restarts=chance.counters(*causes),
            lost_seconds=chance.counters("startup", "restart", "save"),
            budget=make_budget(chance),
            faults=make_faults(chance),
            input_errors=tuple(
                RecordedInputError(number, f"host-{number}")
                for number in range(chance.random.randint(0, 4))
            ),
            has_formed=True,
            last_failure=failure,
            ends=ends,
            training=make_training(chance),
            preparation=make_preparation(chance),
            evaluation=make_evaluation(chance),
            gang=chance.number(),
        ),
        **chance.random.choice(
            (
                {},
                {"given_back": 1 + chance.number(), "come_again_at": chance.time()},
                {"given_back": 0, "come_again_at": chance.time()},
            )
        ),
        usage=make_usage(chance),
    )


def make_coordinator(chance: Chance) -> Coordinator:
    return Coordinator(
        **chance.some(
            attempt=chance.number(),
            image=chance.text(),
            is_recorded=True,
            is_queued=True,
            restarts=chance.counters("stuck", "worker_crash"),
            lost_seconds=chance.counters("startup", "restart"),
        )
    )


def make_budget(chance: Chance) -> Budget:
    return Budget(
        **chance.some(
            failures=chance.number(),
            step=chance.number(),
            checkpoint_step=chance.number(),
            at=chance.time(),
            short_lives=chance.number(),
            retry_at=chance.time(),
            since=FirstStatus(chance.number(), chance.number()),
        )
    )


def make_faults(chance: Chance) -> HostFaults:
    hosts = chance.hosts()
    return HostFaults(
        hosts=hosts,
        seen=chance.times(hosts),
        **chance.some(
            nodes=frozenset(chance.random.sample(range(64), 5)),
            in_a_row=chance.number(),
            at=chance.time(),
            retry_at=chance.time(),
        ),
    )


def make_training(chance: Chance) -> RecordedTraining:
    values = (0.0, 2.41349, 12345.678, 0.0004, -3.5, 99_960.0, 7e9)
    return RecordedTraining(
        **chance.some(
            generation=chance.number(),
            step=chance.number(),
            total_steps=chance.number(),
            loss=chance.random.choice(values),
            tokens_per_second=abs(chance.random.choice(values)),
            eta_seconds=abs(chance.random.choice(values)),
            checkpoint_step=chance.number(),
            checkpoint_at=START + chance.number(),
            ready=chance.number(3),
            updated_at=chance.time(),
            failed_saves=chance.number(),
            save_trouble=chance.text(),
            save_message=chance.text(),
        )
    )


def make_preparation(chance: Chance) -> DataPreparation:
    return DataPreparation(
        **chance.some(
            attempt=chance.number(),
            is_recorded=True,
            prepared=chance.text(),
            work=chance.random.choice(("scan", "tokenize", "done")),
            source=chance.text(),
            bytes_done=chance.number(),
            bytes_total=chance.number(),
            documents=chance.number(),
            tokens=chance.number(),
        )
    )


def make_evaluation(chance: Chance) -> EvaluationProgress:
    hosts = chance.hosts()
    tries = Tries(
        hosts=hosts,
        seen=chance.times(hosts),
        **chance.some(
            failures=chance.number(),
            short_lives=chance.number(),
            faults=chance.number(),
            at=chance.time(),
            retry_at=chance.time(),
        ),
    )
    return EvaluationProgress(
        seen=chance.number(),
        **chance.some(
            attempt=chance.number(),
            is_recorded=True,
            pending=tuple(sorted(chance.random.sample(range(900), chance.number(64)))),
            tries=tries,
            failed=chance.number(),
            failure=chance.random.choice(("why", "ü" * 900)),
            step=chance.number(),
            evaluated=chance.number(),
            results={"heldOut": {"loss": "2.5", "acc": "nan"}, "größe": {}},
            passed_over=chance.random.choice(("step 3: gone", "ü" * 900)),
            state=chance.random.choice(("Waiting", "Failed")),
            message=chance.text(),
        ),
    )


def make_usage(chance: Chance) -> PodTimeAccount:
    if not chance.is_set():
        return PodTimeAccount()
    names = [f"{index}-{chance.number(3)}" for index in range(chance.number(40))]
    names += ["coordinator-0", "prepare-2", "evaluate-100-3"]
    still_open = {name for name in names if chance.is_set()}
    return PodTimeAccount(
        at=int(1000 * START) + chance.number(),
        pods=chance.counters(*USE_NAMES),
        accelerators=chance.counters(*USE_NAMES),
        pending=(chance.number(), -chance.number()),
        open=frozenset(still_open),
        joined=frozenset(name for name in sorted(still_open) if chance.is_set()),
        closed=frozenset(
            name for name in names if name not in still_open and chance.is_set()
        ),
        **chance.some(seen=Reading(chance.number(), chance.counters("training", "saving"))),
    )


# ---- what is compared --------------------------------------------------------------------------------------


def write(memory: Memory, seen: Observation) -> dict[str, Any]:
    """Return a run's status without its conditions, which do not only depend on the memory."""
    action = Action.STOP if seen.run.name == "rests" else Action.RUN
    decision = Decision(action, Phase.WAITING, "Unschedulable", "no host", memory)
    status = build_status(seen, decision, ApplyOutcome(), START)
    return {key: value for key, value in status.items() if key != "conditions"}


def look(name: str) -> Observation:
    run = make_run(name)
    return observe(SpecCache(Config("trainer", "operator").installation).parse(run))


WHOLE = (EndRecord, LastFailure, RecordedFinish, Reading)


def show(value: Any) -> Any:
    """Return a value of a memory as JSON: of most dataclasses the fields that differ from their default."""
    if isinstance(value, FirstStatus):
        return list(dataclasses.astuple(value))
    if dataclasses.is_dataclass(value):
        found = {}
        for one in dataclasses.fields(value):
            default: Any = one.default
            if one.default_factory is not dataclasses.MISSING:
                default = one.default_factory()
            held = getattr(value, one.name)
            if held != default or isinstance(value, WHOLE):
                found[one.name] = show(held)
        return found
    if isinstance(value, Mapping):
        return {str(key): show(one) for key, one in value.items()}
    if isinstance(value, frozenset):
        return sorted(show(one) for one in value)
    return [show(one) for one in value] if isinstance(value, tuple | list) else value


def read(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is remembered of a status, without what is copied from it as it is."""
    known = show(parse_memory({"conditions": [{}], **status}))
    del known["conditions"]
    return dict(known)


def digest(values: list[Any]) -> str:
    text = json.dumps(values, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


FAILED = [
    {
        "type": "Failed",
        "status": "True",
        "reason": "BudgetSpent",
        "message": "why",
        "lastTransitionTime": "2030-03-17T17:46:40Z",
    }
]
PAST = json.dumps(
    {"hosts": [["a", 2], ["b", 1]], "inARow": 3, "at": "2030-03-17T17:46:40Z"}
)
OLDER: dict[str, dict[str, Any]] = {
    "gang with its size": {"memory": {"gang": "3,7"}},
    "gang without its size": {"memory": {"gang": "7"}},
    "given back without a time": {"memory": {"givenBack": "2"}},
    "given back with a time": {"memory": {"givenBack": "2,1900000000"}},
    "given back as often as the second": {"memory": {"givenBack": "5x2"}},
    "stopped without a reason": {"memory": {"stopped": "true"}},
    "stopped for a reason": {"memory": {"stopped": "NonFinite"}},
    "stopped for another reason": {"memory": {"stopped": "Tired"}},
    "formed": {"memory": {"formed": "true"}, "phase": "Waiting"},
    "formed by the phase": {"phase": "Running"},
    "not formed": {"phase": "Waiting", "memory": {"formed": "false"}},
    "hosts without times": {"memory": {"hostFaults": PAST, "faultyNodes": "0-1,4"}},
    "no completion time": {
        "conditions": FAILED,
        "startTime": "2030-03-17T17:46:40+01:00",
    },
    "a completion time": {
        "conditions": FAILED,
        "completionTime": "2030-03-17T17:46:41Z",
    },
    "half of a first status": {"memory": {"budget": '{"sinceAttempt":1,"step":4}'}},
    "a first status": {"memory": {"budget": '{"sinceAttempt":1,"sinceSteps":0}'}},
    "times of the second 0": {
        "startTime": "1970-01-01T00:00:00Z",
        "checkpoint": {"savedAt": "1970-01-01T00:00:00Z"},
        "memory": {"budget": '{"at":"1970-01-01T00:00:00Z"}'},
    },
    "an evaluation without times of hosts": {
        "memory": {"evaluation": '{"attempt":1,"hosts":[["a",1]],"seen":-1}'}
    },
    "a usage without pods": {"memory": {"attempts": "0x3", "usage": '{"at":5}'}},
    "pods without a usage": {"memory": {"attempts": "0x3", "usagePods": "j3"}},
    "a preparation without its pod": {"preparation": {"work": "scan", "bytesDone": 5}},
    "texts that are no JSON": {
        "memory": dict.fromkeys(("budget", "hostFaults", "usage", "evaluation"), "[")
    },
    "values of other types": {
        "attempt": "3",
        "attempts": [{"pod": 3, "cause": "X", "exitCode": True}, "x", {}],
        "lastFailure": {"node": -1, "message": 3, "at": "x"},
        "failures": [],
        "restarts": {"byCause": {"a": 1, "b": -1, "c": "2"}},
        "progress": {"loss": "nan", "tokensPerSecond": "fast", "etaSeconds": "12.5"},
        "memory": {"attempts": "-2", "ended": "3-", "inputErrors": '{"said":[[0,"A b"]]}'},
    },
}
"""Statuses as older releases, or people, wrote them."""


def make_reference() -> dict[str, Any]:
    runs, rests = look("runs"), look("rests")
    memories = [make_memory(seed) for seed in range(MANY)]
    written = [write(one, rests if one.finish else runs) for one in memories]
    return {
        "written": {seed: written[seed] for seed in range(0, FEW, 3)},
        "read": {seed: read(written[seed]) for seed in range(0, FEW, 3)},
        "older": {name: read(status) for name, status in OLDER.items()},
        "digests": {
            "written": digest(written),
            "read": digest([read({"conditions": FAILED, **one}) for one in written]),
        },
    }


def test_the_memory_is_written_and_read_as_in_the_reference() -> None:
    found = json.loads(json.dumps(make_reference()))
    if os.environ.get("GOLDEN") == "write":
        text = yaml.safe_dump(found, sort_keys=True, width=110, allow_unicode=True)
        GOLDEN.write_text(
            "# Memories in statuses; written by test_operator_memory_codec.py.\n" + text
        )
    expected = yaml.safe_load(GOLDEN.read_text(encoding="utf-8"))
    for part in ("older", "written", "read", "digests"):
        assert found[part] == expected[part], part


def test_what_is_written_is_read_back_and_is_then_written_in_the_same_way() -> None:
    runs = look("runs")
    for seed in range(0, MANY, 3):
        written = write(dataclasses.replace(make_memory(seed), finish=None), runs)
        memory = parse_memory({**written, "conditions": [{"type": "Ready"}]})
        again = write(memory, runs)
        assert again == written
        assert parse_memory({**again, "conditions": [{"type": "Ready"}]}) == memory


def test_a_field_that_declares_no_place_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Undeclared:
        step: int = 0

    with pytest.raises(TypeError, match=r"Undeclared\.step: declares no place"):
        encode(Undeclared())
