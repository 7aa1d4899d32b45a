"""Lines that the renames made too long, and words that they left behind."""
import sys
from pathlib import Path
ROOT = Path(sys.argv[1])
def sub(p, *pairs):
    f = ROOT / p
    s = f.read_text("utf-8")
    for a, b in pairs:
        if a not in s:
            print("MISSING", p, repr(a[:70]))
        s = s.replace(a, b)
    f.write_text(s, "utf-8")
sub("trainer_image/evergrad_trainer/node/reports.py", ('''"""``channel.Result``: rank 0's word that the run's end is written down. ``Result``: all fresh workers have ended
because the run asked for it.''', '''"""``channel.WorkerResult``: rank 0 reports that the run's end is recorded. ``Result``: all fresh workers have
ended because the run asked for it.'''))
sub("trainer_image/evergrad_trainer/report/series.py", ("charts have ``SeriesRows``, which all charts of a page share.", "charts have ``SeriesRows``, which all charts\nof a page share."))
