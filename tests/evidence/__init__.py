"""Tables of what is promised, and checks that a test shows each row."""
