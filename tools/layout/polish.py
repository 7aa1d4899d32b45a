"""Lines that the renames made too long, and words that they left behind."""
from edit import sub

sub("trainer_image/evergrad_trainer/node/reports.py", ('''"""``channel.Result``: rank 0's word that the run's end is written down. ``Result``: all fresh workers have ended
because the run asked for it.''', '''"""``channel.WorkerResult``: rank 0 reports that the run's end is recorded. ``Result``: all fresh workers have
ended because the run asked for it.'''))
sub("trainer_image/evergrad_trainer/report/series.py", ("charts have ``SeriesRows``, which all charts of a page share.", "charts have ``SeriesRows``, which all charts\nof a page share."))
