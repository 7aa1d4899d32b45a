"""Who reads which sample, as a pure function: preparation, order, mixture and the streams the loop reads."""
