"""The one error that ends the demo with a sentence for a person instead of a traceback."""


class DemoError(Exception):
    """What was wrong, and the mend."""
