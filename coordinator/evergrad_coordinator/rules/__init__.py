"""Who trains with whom, decided from values: no clock, no socket, no file, no chance."""
