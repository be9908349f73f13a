"""The five services together: throughput, latency, and what each hop costs."""
