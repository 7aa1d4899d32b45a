"""Process groups, the world of one generation, and the transports between the ranks of a world."""
