"""The kernels: functions in Triton's language. The folder above has their launchers, with types and shapes."""
