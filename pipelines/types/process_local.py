"""Marks what never leaves the process that made it."""


class ProcessLocal:
    """`wire.py` refuses such an object by name. What crosses in its place is the context that is made of it."""
