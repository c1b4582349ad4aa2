"""Which of several drafts serves a target best."""
