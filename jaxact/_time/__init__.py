"""Operations that a step computes, and the time that they take at least on a GPU."""

from jaxact._time.flops import count_flops as count_flops
