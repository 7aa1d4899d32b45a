"""Start and end of a script's run, the same for one node and for several nodes on one machine."""

import time
from collections.abc import Callable

from evergrad_common.contract import ExitCode
from evergrad_manifest.errors import ConfigurationError, raise_if
from evergrad_manifest.reading.loader import LoadedManifest
from evergrad_manifest.script_files import script_problems
from evergrad_trainer.node.script_worker import preload
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.run.record import describe_base
from evergrad_trainer.run.resume import resolved_script_record


def prepare_script(
    loaded: LoadedManifest, directory: RunDirectory, serve: Callable[[], int]
) -> Callable[[], int]:
    """Check the script's files, record the run, and import what workers will need. Returns a function that
    serves the run and marks its end.

    All nodes write the same record and the same mark, so the order of the nodes does not matter. Raises
    ConfigurationError if the script's files are not valid.
    """
    run, base = loaded.run, loaded.base_directory
    raise_if(script_problems(run.script, base_directory=base), ConfigurationError)
    # Write only after the files were checked.
    directory.create()
    directory.write_resolved(
        resolved_script_record(run, base_directory=describe_base(base, directory.path))
    )
    preload(run.script, base)

    def serve_to_the_end() -> int:
        code = serve()
        if code == ExitCode.DONE:
            directory.mark_complete({"run": run.metadata.name, "time": time.time()})
        return code

    return serve_to_the_end
