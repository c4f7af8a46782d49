"""Whether this process may compile a model. The entry point sets it before it imports torch."""

possible = True
