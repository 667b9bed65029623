"""The number of a compressed call within its trace.

The rounding noise is a function of a seed and of the data. Two calls with one key, or
none, that meet equal data would therefore be rounded alike, and the product of two
residuals would be biased: E[x' x'] = x^2 + var. So a call's number joins its seed.

The number has to be the same each time that a program is traced, or gradients would
depend on JAX's caches. A count of all calls in the process would not be: a function
that JAX has cached makes no call. Within one trace it is: the trace runs the same
Python code, and calls inside a function that JAX traces apart count there.

Hence two calls are still rounded alike if one traced program makes both: a jitted
function called twice, a scan's body. Keys are for these.
"""

import collections
import threading
from typing import NamedTuple

from jax.extend import core as jex

# Traces that a thread remembers. One that makes no call while so many others do is
# forgotten: it counts from 0 again, and may repeat its first calls' noise.
_TRACES = 1024


class Site(NamedTuple):
    """A place in the user's program that calls a compressed function.

    Attributes:
      name: the function's.
      line: its number in the file.
      instruction: as in `Line`.
    """

    name: str
    filename: str
    line: int
    instruction: int


class _Trace:
    """The calls so far in a trace, and those with each name or path.

    Attributes:
      counts: by name.
      pathless: calls without a path, which a count tells apart; a session's eager
        calls, all of one trace, would fill `sites`.
      sites: by path, numbered.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.pathless = 0
        self.counts = collections.Counter[str]()
        self.sites = collections.defaultdict[str, dict[Site, int]](dict)


class _Traces(threading.local):
    """(state of a trace, its calls), the last one used at the end.

    States compare equal for the same trace, have no hash and keep no trace alive.
    """

    def __init__(self) -> None:
        self.entries: collections.deque[tuple[object, _Trace]] = collections.deque(
            maxlen=_TRACES
        )


_traces = _Traces()


def _current_trace() -> _Trace:
    state, entries = jex.get_opaque_trace_state(), _traces.entries
    trace = _Trace()
    for i in reversed(range(len(entries))):
        if entries[i][0] == state:
            trace = entries[i][1]
            del entries[i]
            break
    entries.append((state, trace))
    return trace


class CallNumber(NamedTuple):
    """The number of a compressed call in its trace.

    Attributes:
      total: how many calls come before it.
      at_path: how many sites of its path come before its own. Without a path every
        call has a site of its own: nothing else tells apart a loop over layers.
    """

    total: int
    at_path: int


def number_in_trace(path: str, site: Site) -> CallNumber:
    """The number of a call in the current trace, which counts it."""
    trace = _current_trace()
    total, trace.calls = trace.calls, trace.calls + 1
    if not path:
        at_path, trace.pathless = trace.pathless, trace.pathless + 1
        return CallNumber(total, at_path)
    sites = trace.sites[path]
    return CallNumber(total, sites.setdefault(site, len(sites)))


def scope_in_trace(name: str) -> str:
    """A scope for a call in the current trace: 'Block', then 'Block_1', 'Block_2'."""
    counts = _current_trace().counts
    number, counts[name] = counts[name], counts[name] + 1
    return f"{name}_{number}" if number else name
