"""What several benchmarks share: processes, workloads, an engine in this process."""
