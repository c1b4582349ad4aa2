"""A conversation in a terminal: the editor, the commands that begin with a slash, the context."""
