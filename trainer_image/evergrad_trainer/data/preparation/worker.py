"""A helper process of ``prepare``. It reads a job per JSON line, and writes a JSON line per result.

It exits when its input ends. It must not import torch.
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
    """Return the first message to a worker, from which it builds the same tokenizer."""
    if isinstance(tokenizer, BackendTokenizer):
        return {
            "json": tokenizer.to_json(),
            "end": tokenizer.end_of_document,
            "identity": tokenizer.identity,
        }
    return {"json": None}


def _answers(line: str, tokenizer: TextTokenizer) -> Iterator[dict[str, Any]]:
    """Run the job of a line, and yield the answers. Errors are answers too, because the parent reports them.

    The last answer to a job has no key ``outcome``.
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
    """Run jobs until standard input ends."""
    # Switch off threads of the tokenizers library, which reads this variable at every call: there is already
    # one helper per core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # The first line describes the parent's tokenizer, and every other line is a job.
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
            # The parent has exited. Finished chunks are on disk for the next attempt.
            sys.stdout = None
            return


if __name__ == "__main__":
    main()
