"""How one residual is stored: an action per file, chosen by a policy."""

from jaxact._codec.affine import Quantize as Quantize
from jaxact._codec.base import Action as Action, Bias as Bias, Codec as Codec
from jaxact._codec.bitfield import Bitfield as Bitfield
from jaxact._codec.cast import Cast as Cast
from jaxact._codec.dithered import Dithered as Dithered
from jaxact._codec.dual import DualPrecision as DualPrecision
from jaxact._codec.exact import Exact as Exact, Recompute as Recompute
from jaxact._codec.mask import Bitmask as Bitmask
from jaxact._codec.offload import Offload as Offload
from jaxact._codec.per_sample import PerSample as PerSample
from jaxact._codec.rotated import Adaptive as Adaptive, Rotated as Rotated
from jaxact._codec.rounded import Rounded as Rounded
from jaxact._codec.stored_size import bytes_of as bytes_of
