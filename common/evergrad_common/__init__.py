"""Names, exit codes, codec, causes, texts and the metrics catalogue, shared by all. Standard library only."""
