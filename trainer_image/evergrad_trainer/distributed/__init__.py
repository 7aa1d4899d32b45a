"""Process groups, the world of one generation, and the transports between its ranks."""
