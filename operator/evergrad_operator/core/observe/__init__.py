"""Raw objects of a run → one Observation and the run's memory."""
