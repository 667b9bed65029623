"""How often Python looks for garbage."""

import gc


def look_rarely() -> None:
    """Tracing makes many small objects: to look through them as often as Python does
    took an eighth of all tests' time, and a quarter of the fuzzer's.
    """
    gc.set_threshold(100_000, 50, 100)
