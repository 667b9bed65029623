"""Opcodes of HLO, by the work that they are for a GPU."""

# They launch nothing: names for values.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier "
    "partition-id replica-id add-dependency".split()
)
# Neither do the ends of asynchronous pairs, such as copy-done.
END = "-done"
# A custom call that launches nothing either.
ALLOCATE = "AllocateBuffer"
# They put elements in other places and compute nothing.
MOVES = FREE | frozenset(
    "broadcast concatenate copy copy-start dynamic-slice dynamic-update-slice gather "
    "iota pad reshape reverse slice transpose".split()
)
# They read the elements that they return, and no others of their first operand.
SLICES = frozenset(["slice", "dynamic-slice", "gather"])
# They call a computation whose instructions are kernels of their own.
CALLS = frozenset(["while", "call", "conditional", "async-start"])

# Where a multiprocessor computes an element: elements a clock. Instructions from the
# machine code of kernels compiled for 9.0, lanes from the CUDA C++ Programming Guide's
# throughput of instructions. Two pipes for adding and multiplying floats take 128.
FLOATS = frozenset("add subtract multiply negate abs".split())
# A look-up of 16 lanes each, and some arithmetic around those with more than one.
LOOKUPS = {
    **dict.fromkeys(["exponential", "log", "rsqrt", "sine", "cosine"], 1),
    **dict.fromkeys(["exponential-minus-one", "log-plus-one", "sqrt", "tanh"], 2),
    **dict.fromkeys(["divide", "logistic", "cbrt"], 2),
    **dict.fromkeys(["power", "erf", "remainder", "tan", "atan2"], 4),
}
