"""Where a program's outputs go."""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxact._jaxpr.types import Atom, Var


@dataclasses.dataclass(frozen=True, eq=False)
class Links:
    """Where a program's outputs go, as far as it is known.

    Attributes:
      carried: in a scan's body, the output of the step before that an input is.
      results: outputs that leave the compressed call.
    """

    carried: Mapping[Var, Atom] = dataclasses.field(default_factory=dict)
    results: Sequence[Var] = ()


NO_LINKS = Links()
