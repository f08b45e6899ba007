"""The composition root: the only place where parts are wired together."""
