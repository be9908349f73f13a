"""Names for the numpy arrays that the worker's columns are made of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt32 = NDArray[np.uint32]
UInt64 = NDArray[np.uint64]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
Int8 = NDArray[np.int8]
UInt8 = NDArray[np.uint8]
UInt16 = NDArray[np.uint16]
