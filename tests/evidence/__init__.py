"""Tables of promised behaviour, and checks that a test shows each row."""
