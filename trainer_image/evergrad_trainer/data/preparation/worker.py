"""A helper process of ``prepare``: one JSON line in, one job, one JSON line out for each of its outcomes.

Ends when its input does. Imports no torch.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.preparation.chunk import execute, job_from_json
from evergrad_trainer.data.tokenizers import (
    BackendTokenizer,
    ByteTokenizer,
    TextTokenizer,
    load_json,
)


def describe_tokenizer(tokenizer: TextTokenizer) -> dict[str, Any]:
    """The first line a worker gets, from which it builds the same tokenizer."""
    if isinstance(tokenizer, BackendTokenizer):
        return {
            "json": tokenizer.to_json(),
            "end": tokenizer.end_of_document,
            "identity": tokenizer.identity,
        }
    return {"json": None}


def _answers(line: str, tokenizer: TextTokenizer) -> Iterator[dict[str, Any]]:
    """Do the job of a line. Errors are values, since the process that can report them is the parent.

    The last answer to a job is the one that is no outcome.
    """
    try:
        job = job_from_json(json.loads(line))
        for outcome in execute(job, tokenizer):
            yield {"outcome": outcome.to_json()}
        yield {"done": True}
    except DataError as error:
        yield {"problems": [vars(problem) for problem in error.problems]}
    except OSError as error:
        yield {"os": [error.errno, error.strerror, str(error.filename or "")]}
    except Exception:  # noqa: BLE001 - the parent raises it, with this traceback
        yield {"failure": traceback.format_exc()}


def main() -> None:
    """Serve until standard input ends."""
    # There is a helper a core already; read by the tokenizers library at every call.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # The first line is the parent's description of its tokenizer; every further one is a job.
    setup = json.loads(sys.stdin.readline())
    tokenizer: TextTokenizer = ByteTokenizer()
    if setup["json"] is not None:
        tokenizer = load_json(
            setup["json"], end_of_document=setup["end"], identity=setup["identity"]
        )
    for line in sys.stdin:
        try:
            for answer in _answers(line, tokenizer):
                print(json.dumps(answer), flush=True)
        except BrokenPipeError:
            # The parent is gone; what was finished lies on disk for the next one.
            sys.stdout = None
            return


if __name__ == "__main__":
    main()
