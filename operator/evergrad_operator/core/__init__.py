"""The operator's decisions, pure: ``observe`` → ``policies`` → ``plan`` and ``status``."""
