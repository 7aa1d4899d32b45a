"""The schema of ``status``, which the operator reports.

The operator writes the whole status; no other component writes it.
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

# Long enough for a cause with its remedy. A failed worker may print any amount, and the object has to stay
# well below etcd's limit of 1.5 MiB.
_LONGEST_MESSAGE: Final = 4096


def _counts(description: str, what: str) -> Schema:
    return {
        "type": "object",
        "description": description,
        "maxProperties": 32,
        "additionalProperties": integer(what, least=0, large=True),
    }


# Like metav1.Condition, so that `kubectl wait` and GitOps tools read it as for other kinds.
_CONDITION: Final[Schema] = mapping(
    "One aspect of the run's state.",
    {
        "type": text(
            "Name of the condition: Ready, Complete, Failed, Suspended, PodsReady, Progressing, "
            "CheckpointHealthy, Stalled, …"
        ),
        "status": {
            "type": "string",
            "description": "True, False or Unknown.",
            "enum": ["True", "False", "Unknown"],
        },
        "reason": text("Reason as one CamelCase word, for programs.", longest=128),
        "message": text(
            "Message: what happened, and what to do.", longest=_LONGEST_MESSAGE
        ),
        "observedGeneration": integer(
            "Generation of the run that this condition describes.", least=0, large=True
        ),
        "lastTransitionTime": moment("Time at which status last changed."),
    },
    required=("type", "status", "reason", "lastTransitionTime"),
)


_PROGRESS: Final[Schema] = mapping(
    "Progress of training, as the nodes last reported it.",
    {
        "step": integer("Number of optimizer steps that are done.", least=0, large=True),
        "totalSteps": integer("Optimizer steps of the whole run.", least=0, large=True),
        "summary": text("Steps that are done, and all steps: 1200/20000.", longest=64),
        "percent": integer(
            "Share of the steps that is done, in percent.", least=0, most=100
        ),
        # Use a text: Kubernetes' conventions forbid floats, which clients in different languages round
        # differently.
        "loss": text("Training loss of the newest step, in nats a token.", longest=32),
        "tokensPerSecond": text(
            "Tokens per second of all nodes together, shortened (41.2k).", longest=32
        ),
        "eta": text(
            "Time until the end at the current speed, shortened (5h12m).", longest=32
        ),
        "etaSeconds": integer(
            "Seconds until the end at the current speed.", least=0, large=True
        ),
        "generation": integer(
            "Number of the group that trains. It grows when nodes join or leave.",
            least=0,
            large=True,
        ),
        # Use the time of the nodes' report and not of the operator's write, so that users see if the nodes
        # stop reporting.
        "updatedAt": moment("Time at which the nodes last reported progress."),
    },
)


# The summary repeats the numbers for the columns of `kubectl get`, which cannot combine two fields.
_NODES: Final[Schema] = mapping(
    "The nodes that train.",
    {
        "summary": text("Ready nodes, and the maximum number of nodes: 3/4.", longest=32),
        "min": integer("Minimum number of nodes that is in force.", least=0),
        "max": integer("Maximum number of nodes that is in force.", least=0),
        "ready": integer("Number of nodes in the group.", least=0),
        "running": integer("Number of pods whose container runs.", least=0),
    },
)


_FAILURE: Final[Schema] = mapping(
    "The newest failure with its root cause: the rank that failed first.",
    {
        "cause": text(
            "Cause as one CamelCase word: WorkerCrash, OutOfMemory, NodeLost, …", longest=64
        ),
        "node": integer("Index of the node, from 0.", least=0),
        "rank": integer("Rank of the process that failed first.", least=0),
        "step": integer("Optimizer step in which it failed.", least=0, large=True),
        "exitCode": integer("Exit code of the process or container."),
        "message": text("Last output, and what to do.", longest=_LONGEST_MESSAGE),
        "at": moment("Time at which the operator observed it."),
    },
)


# One entry for each pod that ended. Only the last ten are kept, because a run may lose pods for weeks.
_ATTEMPT: Final[Schema] = mapping(
    "The end of one pod.",
    {
        "pod": text("Name of the pod."),
        "cause": text("Cause of its end as one CamelCase word.", longest=64),
        "exitCode": integer(
            "Exit code of its container. Absent if the container did not run."
        ),
        "at": moment("Time at which it ended."),
    },
)


_COUNTERS: Final[dict[str, Schema]] = {
    "restarts": mapping(
        "Pods that ended and were replaced.",
        {
            "total": integer("Number of such pods, for any cause.", least=0),
            "byCause": _counts("Number of such pods by cause.", "Number of pods."),
        },
    ),
    "failures": mapping(
        "Failures that failurePolicy counts.",
        {
            "withoutProgress": integer(
                "Failures of pods in a row without progress.", least=0
            ),
            "checkpointStep": integer(
                "Newest checkpoint when counting began.", least=0, large=True
            ),
        },
    ),
}


STATUS: Final[Schema] = mapping(
    "State that the operator reports. Only the operator writes it.",
    {
        "observedGeneration": integer(
            "Newest generation of the run that the operator has processed; -1 before the first.",
            least=-1,
            large=True,
        ),
        "phase": text(
            "Phase of the run as one word, for people. Programs should read conditions.",
            longest=32,
        ),
        "reason": text("Reason of the phase as one CamelCase word.", longest=128),
        "message": text(
            "Message: the reason of the phase, and what to do.",
            longest=_LONGEST_MESSAGE,
        ),
        "image": text(
            "Image of the training pods. It stays until restartNonce changes.", longest=1024
        ),
        "profile": text(
            "Profiles with which the run started. They stay until restartNonce changes."
        ),
        # If it is absent, no pod was ever created, so a refused recipe may still be corrected.
        "recipeHash": text(
            "SHA-256 of the recipe, in hex. Two runs with the same hash train the same recipe.",
            longest=64,
        ),
        "attempt": integer(
            "Number of starts of the run: the first, by restartNonce, and after a suspension.",
            least=0,
        ),
        "restartNonce": text(
            "Value of spec.restartNonce that the operator has processed.", longest=64
        ),
        "startTime": moment("Time at which the run began to start its pods."),
        "completionTime": moment("Time at which the run became Complete or Failed."),
        "coordinator": mapping(
            "The coordinator.",
            {
                "attempt": integer(
                    "Number of its pod, which grows with each new pod.", least=0
                )
            },
        ),
        "nodes": _NODES,
        "progress": _PROGRESS,
        "volume": mapping(
            "Volumes of the run that its file does not show.",
            {
                "goesWithRun": switch(
                    "Whether the run's own claim is deleted with the run (storage.whenDeleted)."
                ),
                "profileClaims": items(
                    "Claims that the run's profile mounts.",
                    text("Name of a claim."),
                    most=64,
                ),
            },
        ),
        "preparation": mapping(
            "Progress of the data preparation.",
            {
                "work": text(
                    "Current stage: scan, tokenize, split, wait or done.", longest=128
                ),
                "source": text("Source that is being prepared.", longest=128),
                "bytesDone": integer(
                    "Bytes of source files that are done.", least=0, large=True
                ),
                "bytesTotal": integer(
                    "Bytes of source files in this stage.", least=0, large=True
                ),
                "percent": integer("Share that is done, in percent.", least=0, most=100),
                "documents": integer("Number of documents produced.", least=0, large=True),
                "tokens": integer("Number of tokens produced.", least=0, large=True),
            },
        ),
        "evaluation": mapping(
            "Evaluation of checkpoints in separate pods.",
            {
                "state": text("UpToDate, Waiting, Evaluating or Failed.", longest=32),
                "message": text("Message: the reason, and what to do.", longest=1024),
                "step": integer(
                    "Step of the newest checkpoint that is evaluated.", least=0, large=True
                ),
                "evaluated": integer(
                    "Number of checkpoints that are evaluated.", least=0, large=True
                ),
                "waiting": integer(
                    "Number of checkpoints that wait for their evaluation.", least=0
                ),
                "passedOver": text(
                    "Newest checkpoint that was skipped, and the reason.", longest=1024
                ),
                "results": items(
                    "Results of the newest evaluation.",
                    mapping(
                        "Results of one set.",
                        {
                            "name": text("Name of the set.", longest=64),
                            "values": texts_by_name(
                                "Loss and other metrics of the set, not rounded.",
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
                "step": integer(
                    "Optimizer step at which it was saved.", least=0, large=True
                ),
                "savedAt": moment("Time at which the operator first observed it."),
                "failedSaves": integer(
                    "Number of saves since then that failed in a row.", least=0
                ),
                "trouble": text("Reason of the last failed save as one word.", longest=64),
                "message": text(
                    "Reason of the last failed save as a sentence.", longest=1024
                ),
            },
        ),
        **_COUNTERS,
        "lastFailure": _FAILURE,
        "attempts": items("The last pods that ended, oldest first.", _ATTEMPT, most=10),
        "usage": mapping(
            "Time of the run's pods, by use.",
            {
                "podHours": text("Pod-hours of all pods.", longest=32),
                "gpuHours": text("Accelerator-hours of all pods.", longest=32),
                "waste": text("Wasted share of the time on hosts.", longest=32),
                "cost": text("Cost by the prices of the chart.", longest=64),
                "byCause": _counts("Seconds by use.", "Number of seconds."),
            },
        ),
        "lostSeconds": _counts("Seconds without training, by cause.", "Number of seconds."),
        # Keep this separate from the text for users, so that its form may change between versions of the
        # operator.
        "memory": texts_by_name(
            "Internal to the operator. Do not depend on it.",
            most=32,
            longest=8192,
        ),
        # Keyed by type, as in Kubernetes' own kinds: two conditions of one type would contradict each other.
        "conditions": items(
            "State of the run, one condition for each aspect.",
            _CONDITION,
            most=16,
            keys=("type",),
        ),
    },
    # Set a default: kstatus, which Flux uses, treats an object without a status as current, so a run that no
    # operator has seen would count as done.
    default={"observedGeneration": -1},
)
"""The structural schema of ``status``.

Values that are not whole numbers are texts, as Kubernetes' conventions require.
"""
