"""The decision about one residual: its action, the reason, the bias that it leaves."""

import dataclasses
import enum

from jaxact._codec import Action, Bias, Codec, Exact
from jaxact._codec.parts import for_complex
from jaxact._residual import Residual


class Reason(enum.Enum):
    """Why a residual has its action, as tables say it."""

    RULE = "rule"
    DEFAULT = "policy default"
    BITS = "policy bits"
    MASK = "one bit is exact"
    INTEGERS = "a few bits are exact"
    NOT_FLOAT = "stays exact"
    SMALL = "small"
    STATISTIC = "a statistic"
    REFERENCED = "a parameter, referenced in place"
    NOT_AN_ACTIVATION = "an argument not named in activations"
    OF_PARAMETERS = "made of parameters or constants alone"
    STORED_INSIDE = "stored by a compressed call inside"
    GRADIENT = "a custom rule returns it as a gradient"
    ON_HOST = "offloaded by a checkpoint's policy"
    SOLVED_WITH = "a matrix that is factorized or solved with"
    DIVIDED_BY = "something is divided by it, or its logarithm or root is taken"
    ORDERED = "the backward pass sorts it again, or finds its largest elements"
    BENT_AGAIN = "a loop with a nonlinear state is computed from it again"
    UNDONE = "a loop has earlier sums from the last one and it, by subtraction"
    SHORT_NORM = "it is normalized over only a few values"
    COMPLEMENT = "a number minus its sum comes near a pole, as in 1 / (1 - |u|^2)"
    WEIGHTED = "it is multiplied by its own exponential, as in sum(p log p)"
    UNLIKE_ROWS = "something is divided by its row sums, which may have any size"
    NEAR_POLE = "it, or its divisor, comes near a pole (of a logarithm, a root, 1 / x)"
    REPEATED = "larger arrays are made from it: its differences from others, say"
    RETURNED = "a positive output: a loss outside may take its logarithm or inverse"
    BEFORE_POLE = (
        "a derivative near a pole, or with an exponential, is computed from it and "
        "multiplied again"
    )
    ARGUMENT = "an argument: there is nothing to recompute it from"
    SIDE_EFFECT = "not recomputed: that would repeat a side effect"
    CARRIED = "a scan's carry, kept exactly for each step"
    OUTSIDE = "not in a compressed call"


class Remark(enum.Enum):
    """Something else that a table says about a residual."""

    RECOMPUTED_FROM = "others are recomputed from it"
    CUSTOM_RULE = "kept for a checkpoint or a custom rule"
    NORMALIZED = "normalized"


@dataclasses.dataclass(frozen=True)
class Decision:
    """The action for one residual, and the reason.

    Attributes:
      reason: why it has this action.
      bias: the bias that this leaves in the gradient.
      remarks: for tables.
      rule: index of the policy's rule that decided, if one did.
      declined: why the chosen action could not store it; '' where it could.
    """

    residual: Residual
    action: Action
    reason: Reason
    rule: int | None = None
    bias: Bias = Bias.EXACT
    declined: str = ""
    remarks: tuple[Remark, ...] = ()

    @property
    def codec(self) -> Codec:
        """The action, of a residual that is stored."""
        assert isinstance(self.action, Codec), f"{self.action} stores nothing"
        return self.action

    def at(self, prefix: str) -> "Decision":
        """The same about the residual of a call with this module path."""
        return dataclasses.replace(self, residual=self.residual.at(prefix))

    @property
    def why(self) -> str:
        """The reason and the remarks, as text."""
        reason = self.reason.value
        if self.reason is Reason.NOT_FLOAT:
            reason = f"{self.residual.dtype} {reason}"
        if self.rule is not None:
            reason += f" {self.rule}"
        if self.declined:
            reason += f": {self.declined}"
        return "; ".join([reason, *(remark.value for remark in self.remarks)])

    def with_remark(self, remark: Remark) -> "Decision":
        """The same, with one more remark."""
        return dataclasses.replace(self, remarks=(*self.remarks, remark))

    def repeated(self) -> "Decision":
        """The same for a residual that a path of the backward pass uses twice."""
        if self.bias not in (Bias.UNBIASED, Bias.OVER_ROTATIONS):
            return self
        return dataclasses.replace(self, bias=Bias.FIRST_ORDER)

    def biased(self, remark: Remark) -> "Decision":
        """The same for a residual that something nonlinear is computed from."""
        if self.bias is Bias.EXACT:
            return self
        return dataclasses.replace(self.with_remark(remark), bias=Bias.BIASED)


def applied(
    action: Action, residual: Residual, reason: Reason, rule: int | None = None
) -> Decision:
    """The decision to store a residual by an action, or exactly if that declines."""
    declined = action.declines(residual.shape, residual.dtype)
    if declined is not None and residual.is_complex and isinstance(action, Codec):
        action = for_complex(action)
        declined = action.declines(residual.shape, residual.dtype)
    if declined is None:
        return Decision(residual, action, reason, rule, action.bias)
    return Decision(residual, Exact(), reason, rule, declined=declined)
