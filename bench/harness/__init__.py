"""Parts that several benchmarks share: processes, workloads, an engine in this process."""
