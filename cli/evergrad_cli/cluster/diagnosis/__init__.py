"""The checks of ``evergrad doctor``: one result for each check, with a remedy."""
