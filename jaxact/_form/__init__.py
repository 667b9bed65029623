"""Choose the stored values: small, unbiased, well-conditioned residuals.

The residuals that `jax.vjp` happens to keep are too many (one or two arrays for every
step of a GELU), and recomputing nonlinear functions from rounded values is biased. The
linearized program only ever multiplies cotangents with residuals, so a gradient is
unbiased when each residual is rounded without bias and independently. Three passes over
the traced program, none of which looks at a function's name, keep that and store less:

1. *Rewrite* (`rewriting.py`), before `jax.vjp`. Calls are inlined, equal equations
   evaluated once. Connected elementwise equations become a cell (`cells.py`), which
   keeps its local derivative in the fewest arrays (`derivative.py`): one for a GELU,
   one bit where the derivative has two values. A max-pool keeps the index in its window
   (`pooling.py`), a softmax its output (`softmax.py`).

   Values that a custom backward rule computes from residuals alone are computed in the
   forward pass, where that stores no more (`rule_factors.py`).

2. *Classify* (`classify.py`), after it. Values are exact (parameters, row and
   channel statistics (`statistics.py`), masks, integers) or affine, with exact
   coefficients, in a base. For LayerNorm and BatchNorm, xhat = (x - mean) * rstd is
   affine in x, and so is the next matmul's or, the ReLU's mask being exact, the next
   convolution's input: one array serves them all. An affine image of an unbiased value
   is unbiased.

3. *Store* (`chooser.py`, `bases.py`). Each base is stored once, through the action that
   the policy chooses for it; the few cheap equations between it and the residuals are
   evaluated again in the backward pass.

Bias. A gradient is exactly unbiased where no path in the backward pass multiplies two
residuals with one base (`jaxact/_plan/uses.py` reads that off the backward program).
Softmax does (its Jacobian is diag(y) - y y^T) and so does a norm's; the bias that
remains is made of the elements' variances: E[y' y'^T] = y y^T + diag(var). Where the
cotangents of a long row are alike it is little beside the noise of the row's sum, as
`tests/laws/test_form_bias.py` measures for a softmax and a norm alone; in a network it
may be as large as the noise. The label is "unbiased to first order". A value that is
recomputed nonlinearly from rounded ones, in a `jax.checkpoint` or a custom rule or
because a policy says `Recompute()`, is biased and so labelled.

Local derivatives as elimination on a graph: Griewank and Walther, Evaluating
Derivatives (2008), chapter 9. Unbiased gradients from unbiased residuals: ActNN (Chen
et al. 2021, arXiv:2104.14129), theorem 1; GACT (Liu et al. 2022, arXiv:2206.11357),
section 3. BatchNorm and ReLU from one array and a bit: AC-GC (Evans and Aamodt 2021)
keeps the same for ReLU alone.
"""

from jaxact._form.bases import plan_bases as plan_bases
from jaxact._form.flattening import flattened as flattened
from jaxact._form.rewriting import rewrite as rewrite
from jaxact._form.rule_factors import (
    least as least,
    with_rule_factors as with_rule_factors,
)
