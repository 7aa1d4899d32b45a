"""Configures the log: lines of text for people, or of JSON for log collectors."""

import json
import logging
import sys
from datetime import UTC, datetime

from aiohttp.http_exceptions import HttpProcessingError


class JsonFormatter(logging.Formatter):
    """Formats each record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON, with its traceback."""
        moment = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # Keep non-ASCII names of runs and files readable in a collector that shows the raw line.
        return json.dumps(line, ensure_ascii=False)


class BadRequests(logging.Filter):
    """Drops aiohttp's log records with tracebacks about requests that are not valid HTTP.

    Every pod can send any number of such requests to the operator's ports. The answer describes the problem.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False if the record is about a request that is not valid HTTP, otherwise True."""
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def set_up_logging(level: str, form: str) -> None:
    """Log to standard error, as text or JSON."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # kopf logs every object that it sees, and asyncio every slow callback.
    wanted = logging.getLevelName(level.upper())
    logging.getLogger("kopf").setLevel(max(logging.WARNING, wanted))
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.server").addFilter(BadRequests())
