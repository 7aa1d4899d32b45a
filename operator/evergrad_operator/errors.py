"""The operator's errors, one tree.

OperatorError         the operator cannot do what it should
└── SpecError         an object does not have the shape that the API server promises
"""


class OperatorError(Exception):
    """The operator cannot do what it should. The message says where, what, why and what helps."""


class SpecError(OperatorError):
    """A TrainingRun does not have the shape of its schema, so operator and CRD are of different versions, or one was edited.

    ``path`` is the field's path.
    """

    def __init__(self, path: str, what: str) -> None:
        self.path = path
        super().__init__(f"{path}: {what}. Install the CRD that belongs to this operator and apply the run again.")
