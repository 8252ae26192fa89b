"""Cases of `add_rms_norm`: sums are equal, norms as close as those of `rms_norm`."""

from octavo.kernels.rms_norm.cases import EPS as EPS
from octavo.kernels.rms_norm.cases import ROWS as ROWS
from octavo.kernels.rms_norm.cases import TOLERANCES as TOLERANCES
from octavo.kernels.rms_norm.cases import WIDTHS as WIDTHS
