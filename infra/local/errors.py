"""The one error that the local stack raises: a message for the person who typed the command."""


class StackError(Exception):
    """The stack cannot be brought up or down; the message says what was wrong and what to do about it."""
