"""The schema of ``status``: what the operator reports.

The operator writes it as a whole; nobody else does.
"""

from typing import Final

from evergrad_manifest.structure.nodes import (
    Schema,
    integer,
    items,
    mapping,
    moment,
    switch,
    text,
    texts_by_name,
)

# Long enough for a cause with its remedy. A worker that fails may print any amount, and the object has to
# stay far below the 1.5 MiB that etcd takes.
_LONGEST_MESSAGE: Final = 4096


def _counts(description: str, what: str) -> Schema:
    return {
        "type": "object",
        "description": description,
        "maxProperties": 32,
        "additionalProperties": integer(what, least=0, large=True),
    }


# As metav1.Condition, so that `kubectl wait` and GitOps tools read it as they read those of other kinds.
_CONDITION: Final[Schema] = mapping(
    "One aspect of the run's state.",
    {
        "type": text(
            "Which: Ready, Complete, Failed, Suspended, PodsReady, Progressing, "
            "CheckpointHealthy, Stalled, …"
        ),
        "status": {
            "type": "string",
            "description": "True, False or Unknown.",
            "enum": ["True", "False", "Unknown"],
        },
        "reason": text("Why, in one CamelCase word for programs.", longest=128),
        "message": text(
            "Why, in words: what happened and what to do.", longest=_LONGEST_MESSAGE
        ),
        "observedGeneration": integer(
            "Generation of the run that this is about.", least=0, large=True
        ),
        "lastTransitionTime": moment("When status last changed."),
    },
    required=("type", "status", "reason", "lastTransitionTime"),
)


_PROGRESS: Final[Schema] = mapping(
    "How far training is, as the nodes last reported it.",
    {
        "step": integer("Optimizer steps done.", least=0, large=True),
        "totalSteps": integer("Optimizer steps of the whole run.", least=0, large=True),
        "summary": text("Steps done, of all: 1200/20000.", longest=64),
        "percent": integer(
            "Share of the steps that is done, in percent.", least=0, most=100
        ),
        # A text: Kubernetes' conventions forbid floats, which clients in different languages round
        # differently.
        "loss": text("Training loss of the newest step, in nats a token.", longest=32),
        "tokensPerSecond": text(
            "Tokens a second of all nodes together, shortened (41.2k).", longest=32
        ),
        "eta": text("Time to the end at this speed, shortened (5h12m).", longest=32),
        "etaSeconds": integer("Seconds to the end at this speed.", least=0, large=True),
        "generation": integer(
            "Serial of the group that trains; it grows as nodes come and go.",
            least=0,
            large=True,
        ),
        # The time of the nodes' report and not of the operator's write, so that their silence shows.
        "updatedAt": moment("When the nodes last reported progress."),
    },
)


# The summary repeats the numbers for the columns of `kubectl get`, which cannot join two fields into one
# text.
_NODES: Final[Schema] = mapping(
    "The nodes that train.",
    {
        "summary": text("Ready nodes, of the most it may use: 3/4.", longest=32),
        "min": integer("Bounds in force: the fewest nodes.", least=0),
        "max": integer("Bounds in force: the most nodes.", least=0),
        "ready": integer("Nodes that are part of the group.", least=0),
        "running": integer("Pods whose container runs.", least=0),
    },
)


_FAILURE: Final[Schema] = mapping(
    "The newest failure with its root cause: the first rank that failed, not those it took along.",
    {
        "cause": text(
            "Why, in one CamelCase word: WorkerCrash, OutOfMemory, NodeLost, …", longest=64
        ),
        "node": integer("Index of the node, from 0.", least=0),
        "rank": integer("Rank of the process that failed first.", least=0),
        "step": integer("Optimizer step it failed in.", least=0, large=True),
        "exitCode": integer("Exit code of the process or container."),
        "message": text("What it said, and what to do.", longest=_LONGEST_MESSAGE),
        "at": moment("When it was seen."),
    },
)


# One for each pod that ended, and only the last ten: a run may lose pods for weeks.
_ATTEMPT: Final[Schema] = mapping(
    "The end of one pod.",
    {
        "pod": text("Name of the pod."),
        "cause": text("Why it ended, in one CamelCase word.", longest=64),
        "exitCode": integer("Exit code of its container; absent when it did not run."),
        "at": moment("When it ended."),
    },
)


_COUNTERS: Final[dict[str, Schema]] = {
    "restarts": mapping(
        "Pods that ended and were replaced.",
        {
            "total": integer("How many, whatever the cause.", least=0),
            "byCause": _counts("How many by each cause.", "How many."),
        },
    ),
    "failures": mapping(
        "What failurePolicy counts.",
        {
            "withoutProgress": integer(
                "Failures of pods in a row without progress between them.", least=0
            ),
            "checkpointStep": integer(
                "Newest checkpoint when counting began.", least=0, large=True
            ),
        },
    ),
}


STATUS: Final[Schema] = mapping(
    "What the operator reports. Written by it alone.",
    {
        "observedGeneration": integer(
            "Newest generation of the run that was looked at; -1 before the first.",
            least=-1,
            large=True,
        ),
        "phase": text(
            "The run in one word, for people; programs read conditions.", longest=32
        ),
        "reason": text("Why it is so, in one CamelCase word.", longest=128),
        "message": text(
            "Why it is so, and what to do if something is to be done.",
            longest=_LONGEST_MESSAGE,
        ),
        "image": text(
            "Image of the training pods, kept until restartNonce changes.", longest=1024
        ),
        "profile": text("Profiles the run began with, kept until restartNonce changes."),
        # Its absence means that no pod was ever made, so that a refused recipe may still be corrected.
        "recipeHash": text(
            "SHA-256 of the recipe, in hex: two runs of the same hash train the same.",
            longest=64,
        ),
        "attempt": integer(
            "How often the run was started: at first, by restartNonce, after a suspension.",
            least=0,
        ),
        "restartNonce": text("Value of spec.restartNonce that was acted upon.", longest=64),
        "startTime": moment("When the run began to start its pods."),
        "completionTime": moment("When the run became Complete or Failed."),
        "coordinator": mapping(
            "The coordinator.",
            {"attempt": integer("Serial of its pod, which grows.", least=0)},
        ),
        "nodes": _NODES,
        "progress": _PROGRESS,
        "volume": mapping(
            "Its volumes, as far as its file does not show them.",
            {
                "goesWithRun": switch(
                    "Whether its own claim is deleted with it (storage.whenDeleted)."
                ),
                "profileClaims": items(
                    "Claims that its profile mounts.", text("Name of one."), most=64
                ),
            },
        ),
        "preparation": mapping(
            "How far the preparation of the data is.",
            {
                "work": text(
                    "What it does: scan, tokenize, split, wait or done.", longest=128
                ),
                "source": text("The source it works on.", longest=128),
                "bytesDone": integer("Bytes of source files done.", least=0, large=True),
                "bytesTotal": integer("Bytes of this work.", least=0, large=True),
                "percent": integer("Share that is done.", least=0, most=100),
                "documents": integer("Documents made.", least=0, large=True),
                "tokens": integer("Tokens made.", least=0, large=True),
            },
        ),
        "evaluation": mapping(
            "The evaluation of checkpoints in pods of their own.",
            {
                "state": text("UpToDate, Waiting, Evaluating or Failed.", longest=32),
                "message": text("Why, and what to do.", longest=1024),
                "step": integer("Newest checkpoint evaluated.", least=0, large=True),
                "evaluated": integer("Checkpoints evaluated.", least=0, large=True),
                "waiting": integer("Checkpoints that wait.", least=0),
                "passedOver": text(
                    "Newest checkpoint without results, and why.", longest=1024
                ),
                "results": items(
                    "Its results.",
                    mapping(
                        "One set.",
                        {
                            "name": text("Its name.", longest=64),
                            "values": texts_by_name(
                                "Its loss and other metrics, without rounding.",
                                most=12,
                                longest=32,
                            ),
                        },
                    ),
                    most=16,
                ),
            },
        ),
        "checkpoint": mapping(
            "The newest valid checkpoint.",
            {
                "step": integer("Optimizer step it was saved at.", least=0, large=True),
                "savedAt": moment("When the operator first observed it."),
                "failedSaves": integer(
                    "Saves since then that have failed in a row.", least=0
                ),
                "trouble": text("Why the last of them failed, in one word.", longest=64),
                "message": text("The same in words.", longest=1024),
            },
        ),
        **_COUNTERS,
        "lastFailure": _FAILURE,
        "attempts": items("The last pods that ended, oldest first.", _ATTEMPT, most=10),
        "usage": mapping(
            "Time of its pods.",
            {
                "podHours": text("Of all.", longest=32),
                "gpuHours": text("Of accelerators.", longest=32),
                "waste": text("Share of the time on hosts.", longest=32),
                "cost": text("By the prices of the chart.", longest=64),
                "byCause": _counts("Seconds by use.", "Seconds."),
            },
        ),
        "lostSeconds": _counts("Seconds without training, by what took them.", "Seconds."),
        # Apart from what people read, so that its form may change from one version of the operator to the
        # next.
        "memory": texts_by_name(
            "What the operator must not forget; no promise to anybody.",
            most=32,
            longest=8192,
        ),
        # By type, as in Kubernetes' own kinds: two conditions of one type would contradict each other.
        "conditions": items(
            "The run's state, one entry for each aspect.",
            _CONDITION,
            most=16,
            keys=("type",),
        ),
    },
    # A run that no operator has seen would count as done: kstatus, and Flux with it, calls an object without
    # any status current.
    default={"observedGeneration": -1},
)
"""The structural schema of ``status``.

Values that are no whole numbers are texts, as Kubernetes' conventions ask.
"""
