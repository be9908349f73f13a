"""The error function's constants, by Abramowitz and Stegun, formula 7.1.26: at most 1.5e-7 off.

erf(z) = 1 - (a1 t + ... + a5 t^5) exp(-z^2) with t = 1 / (1 + p z), for z >= 0.
"""

from __future__ import annotations

from typing import Final

ERF_SCALE: Final = 0.3275911
"""p."""
ERF_COEFFICIENTS: Final = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""a5 to a1."""
