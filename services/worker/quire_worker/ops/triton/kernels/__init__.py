"""The kernels alone: functions of Triton's language. Their launchers, with types and shapes, are beside this folder."""
